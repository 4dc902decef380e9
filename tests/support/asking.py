"""One or two models in memory asked the same questions."""

from torch import nn

from compress.evaluation.document import TaskResult
from compress.evaluation.tasks.evaluate import TokenizedTasks, ask_tasks, compare_tasks


def answered(prepared: TokenizedTasks, *models: nn.Module) -> list[TaskResult]:
    """The figures of the first model, paired with those of the second where there is one."""
    return compare_tasks(*(ask_tasks(prepared, model, lambda more, name: None) for model in models))
