"""One or two models in memory asked the same questions."""

from torch import nn

from compress.evaluation.document import TaskResult
from compress.evaluation.tasks.evaluate import Prepared, ask_tasks, compare_tasks


def answered(prepared: Prepared, *models: nn.Module) -> list[TaskResult]:
    """The figures of the first model, paired with those of the second where there is one."""
    return compare_tasks(*(ask_tasks(prepared, model, lambda more, name: None) for model in models))
