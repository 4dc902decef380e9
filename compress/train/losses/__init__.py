"""Losses as pure functions of tensors: each gives a sum over valid tokens or pairs, and how many they are.

A training step divides by the count of all ranks and all accumulated batches, not by its own:

    found = logits_loss(student, teacher, labels=labels)            Summed(total, count)
    (found.total / count of everything in the step).backward()

so that how a batch is cut decides nothing. Under a wrapper that averages gradients over ranks (DDP, FSDP2's default),
the ranks' number is a further factor. Sums of losses with weights are the recipe's business.
"""
