"""Batch norms go into the layers before them where only they read those, and nowhere else."""

import copy

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional

import compress
from compress.base.errors import CompressError, InputError


def randomized(model):
    """The model with batch norms that do something, in evaluation mode."""
    generator = torch.Generator().manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None:
            module.running_mean.normal_(generator=generator)
            module.running_var.uniform_(0.2, 3, generator=generator)
            if module.affine:
                module.weight.data.normal_(generator=generator)
                module.bias.data.normal_(generator=generator)
    return model.eval()


def fold(model, x):
    """What was folded, having checked that the function stays."""
    with torch.no_grad():
        before = model(x)
        found = compress.fold_batch_norm(model, {"x": x} if not isinstance(model, nn.Sequential) else {"input": x})
        after = model(x)
    assert (after - before).abs().max() <= 1e-5 * before.abs().max()
    return found


@pytest.mark.parametrize(
    ("layer", "norm", "shape"),
    [
        (lambda: nn.Conv2d(4, 6, 3), lambda: nn.BatchNorm2d(6), (2, 4, 8, 8)),
        (lambda: nn.Conv2d(4, 8, 3, groups=4, bias=False), lambda: nn.BatchNorm2d(8), (2, 4, 8, 8)),
        (lambda: nn.Conv2d(4, 4, 3, groups=4), lambda: nn.BatchNorm2d(4, affine=False), (2, 4, 8, 8)),
        (lambda: nn.Conv1d(4, 6, 3, bias=False), lambda: nn.BatchNorm1d(6, eps=1e-3), (2, 4, 8)),
        (lambda: nn.Linear(4, 6), lambda: nn.BatchNorm1d(6), (5, 4)),
        (lambda: nn.Linear(4, 6, bias=False), lambda: nn.SyncBatchNorm(6), (5, 4)),
    ],
)
def test_a_norm_behind_a_layer_is_folded(layer, norm, shape):
    torch.manual_seed(0)
    model = randomized(nn.Sequential(layer(), norm(), nn.ReLU(), nn.Flatten()))
    found = fold(model, torch.randn(shape))
    assert found.folded == {"1": "0"}
    assert found.left_alone == {}
    assert isinstance(model[1], nn.Identity)
    assert model[0].bias.requires_grad


def test_training_mode_and_other_precisions_survive():
    model = randomized(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))).to(torch.bfloat16).train()
    x = torch.randn(2, 3, 8, 8, dtype=torch.bfloat16)
    assert compress.fold_batch_norm(model, {"input": x}).folded == {"1": "0"}
    assert model.training
    assert model[0].weight.dtype == model[0].bias.dtype == torch.bfloat16


class Odd(nn.Module):
    """Batch norms that cannot be folded, each for a reason of its own."""

    def __init__(self):
        super().__init__()
        self.plain, self.plain_norm = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.read_twice, self.read_twice_norm = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.returned, self.returned_norm = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.called_twice, self.called_twice_norm = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.norm_called_twice = nn.BatchNorm2d(4)
        self.far, self.far_norm = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.first_norm = nn.BatchNorm2d(3)
        self.batch_only, self.batch_only_norm = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4, track_running_stats=False)
        self.tokens, self.tokens_norm = nn.Linear(8, 8), nn.BatchNorm1d(4)
        self.tied, self.other, self.tied_norm = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.other.weight = self.tied.weight
        self.unused = nn.BatchNorm2d(4)

    def forward(self, x):
        x = self.plain_norm(self.plain(self.first_norm(x)))
        y = self.read_twice(x)
        x = self.read_twice_norm(y) + y.sigmoid()
        returned = self.returned(x)
        x = self.returned_norm(returned)
        x = self.called_twice(self.called_twice_norm(self.called_twice(x)))
        x = self.norm_called_twice(self.norm_called_twice(x))
        x = self.far_norm(functional.relu(self.far(x)))
        x = self.batch_only_norm(self.batch_only(x))
        x = self.tied_norm(self.tied(x)) + self.other(x)
        return x + self.tokens_norm(self.tokens(x[:, :, 0]))[:, :, None], returned


def test_what_stays_is_reported_with_its_reason():
    torch.manual_seed(0)
    model, x = randomized(Odd()).double(), torch.randn(2, 3, 8, 8, dtype=torch.float64)
    with torch.no_grad():
        before = model(x)
        found = compress.fold_batch_norm(model, {"x": x})
        after = model(x)
    for old, new in zip(before, after, strict=True):
        assert (new - old).abs().max() <= 1e-10 * old.abs().max()
    assert found.folded == {"plain_norm": "plain"}
    expected = {
        "read_twice_norm": "the output of read_twice also goes to an operation (aten.sigmoid.default)",
        "returned_norm": "the output of returned also goes to the model's output",
        "called_twice_norm": "called_twice is called 2 times in a forward pass",
        "norm_called_twice": "called 2 times in a forward pass",
        "far_norm": "its input is not the output of a convolution or linear layer",
        "first_norm": "its input is not the output of a convolution or linear layer",
        "batch_only_norm": "keeps no running statistics",
        "tokens_norm": "normalizes another dimension than the outputs of tokens",
        "tied_norm": "it or tied shares a parameter with another module",
        "unused": "called 0 times in a forward pass",
    }
    assert dict(found.left_alone) == expected


def test_a_sum_behind_the_layer_is_seen_whatever_it_is_written_with():
    class Skip(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)

        def forward(self, x):
            y = self.conv(x)
            kept = y.view(y.shape)
            return kept + self.norm(y)

    found = fold(randomized(Skip()), torch.randn(2, 3, 4, 4))
    assert found.folded == {}
    assert "aten.view" in found.left_alone["norm"]


def test_a_fold_that_would_change_the_function_is_undone():
    """A hook that looks at the weight: nothing that watching tensors could see."""
    model = randomized(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()))
    model[0].register_forward_hook(lambda module, _, output: output * module.weight.abs().mean())
    before = copy.deepcopy(model.state_dict())
    modules = [type(module) for module in model]
    with pytest.raises(CompressError, match="would change the model's output by"):
        compress.fold_batch_norm(model, {"input": torch.randn(2, 3, 8, 8)})
    assert [type(module) for module in model] == modules
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(model.state_dict()[key], value) for key, value in before.items())


def test_a_model_of_transformers_is_folded_in_memory():
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 12], depths=[1, 2], num_labels=5)
    torch.manual_seed(0)
    model, x = randomized(transformers.ResNetForImageClassification(config)), torch.randn(2, 3, 32, 32)
    count = sum(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    with torch.no_grad():
        before = model(pixel_values=x).logits
        found = compress.fold_batch_norm(model, {"pixel_values": x})
        after = model(pixel_values=x).logits
    assert len(found.folded) == count
    assert not any(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    assert (after - before).abs().max() <= 1e-5 * before.abs().max()


def test_a_batch_is_a_dictionary():
    with pytest.raises(InputError, match="dictionary of the model's inputs"):
        compress.fold_batch_norm(nn.Sequential(), torch.randn(2))
