"""Calibration data (text, tokens, chats, images), and files of a teacher's logits on them."""
