"""The original that a model is compared with. It is asked once for every text and every task; answers that can be
cached are (`quality.reference_states`, `tasks.reference_answers`)."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from compress.base.errors import CompressError
from compress.checkpoint.read.source import Source
from compress.checkpoint.sensitivity import Sensitivity, sensitivity_of_model
from compress.evaluation.document import Figure, SensitivityResult, UnitSensitivity
from compress.evaluation.probes.answers import Prompts
from compress.evaluation.provenance import name_model, size_of
from compress.evaluation.quality import noise
from compress.evaluation.quality.language import Model, load_predictor
from compress.evaluation.quality.overflow import Largest, watch_overflow
from compress.evaluation.quality.predictor import Predictions, Predictor, measure, predictor
from compress.evaluation.quality.reference_states import CachedStates, Note, keep_states, place_of, read_states
from compress.evaluation.quality.texts import Text
from compress.evaluation.tasks.evaluate import TokenizedTasks, ask_task
from compress.evaluation.tasks.reference_answers import Answered, keep_answers, read_answers
from compress.evaluation.tasks.reference_answers import place_of as place_of_answers
from compress.model.calls import evaluating

NOT_MEASURED = "nothing is kept of it: `compress fit` measures it"
NOT_READ = "nothing was read that is kept of the original"
IN_MEMORY = "the original was in memory, where nothing is kept of it"


def sensitivity_of(original: Model) -> SensitivityResult | str:
    """The latest sensitivity measurement of an original, or the reason why there is none."""
    if not isinstance(original, Source):
        return IN_MEMORY
    found = sensitivity_of_model(original.fingerprint())
    return NOT_MEASURED if found is None else result_of(found)


def result_of(table: Sensitivity) -> SensitivityResult:
    """A table of sensitivities as the result shown in a report."""
    units = [
        UnitSensitivity(
            unit.name,
            unit.layers,
            {name: tried.fisher for name, tried in unit.tried.items()},
        )
        for unit in table.units
    ]
    bits = {}
    for name in table.candidates:
        tried = [(unit.tried[name].bytes, unit.weights) for unit in table.units if name in unit.tried]
        if tried:
            bits[name] = 8 * sum(size for size, _ in tried) / sum(weights for _, weights in tried)
    return SensitivityResult(bits, units, table.uniform_kl, table.calibration, table.held_out)


class Original:
    """A reference on some texts. unwritten: prompts that it answers first, which makes another text of `texts`. device,
    dtype: of its arithmetic, as `load_predictor` has them; cache: whether its outputs may be cached; tasks: asked
    beside the texts. Loads the model, and releases its body where every answer is cached. overflow: of all texts that
    it was asked about. written: its answers to `prompts`."""

    def __init__(
        self,
        model: Model,
        texts: Sequence[Text],
        unwritten: Prompts | None = None,
        *,
        dtype: torch.dtype | None,
        device: torch.device,
        cache: bool,
        tasks: TokenizedTasks | None,
        note: Note,
    ) -> None:
        self.model, self.texts, self.dtype, self.device, self.note = model, [*texts], dtype, device, note
        network: nn.Module = load_predictor(model, dtype, device)
        self.size = size_of(model)
        self.name = name_model(model, network, self.size)
        self.arithmetic = next(network.parameters()).dtype
        self.sensitivity: SensitivityResult | str = sensitivity_of(model) if cache else NOT_READ
        self.tasks = tasks
        self.prompts, self.written = unwritten, list[list[int]]()
        keeps = cache and isinstance(model, Source) and not model.code
        if unwritten is not None:
            self.written = unwritten.answers(network, model if keeps and isinstance(model, Source) else None, note)
            self.texts.append(unwritten.text(self.written))
        self.answered = [] if tasks is None else self._answered(tasks, next(network.parameters()), keeps)
        self.whole: nn.Module | None = None if all(known is not None for _, known in self.answered) else network
        self.asked: Predictor | None = None
        self.overflow = Largest()
        if self.texts:
            self._prepare(network, cache)

    def _prepare(self, network: nn.Module, cache: bool) -> None:
        """Read the cached outputs for each text; keep the model only where some are missing."""
        model, texts = self.model, self.texts
        with evaluating(network):
            asked = predictor(network, texts[0].windows)
        self.head = asked.head
        self.places = self._places(asked) if cache and isinstance(model, Source) else [None for _ in texts]
        self.kept = [self._read(i) for i in range(len(texts))]
        self.asked = None if all(self.kept) else asked

    @property
    def network(self) -> nn.Module:
        """The model itself, loaded again if it was released."""
        if self.asked is not None:
            return self.asked.network
        return load_predictor(self.model, self.dtype, self.device) if self.whole is None else self.whole

    def _answered(
        self, tasks: TokenizedTasks, parameter: Tensor, keeps: bool
    ) -> list[tuple[Path | None, Answered | None]]:
        """(Cache file, cached answers) of each task; None for what does not exist."""
        answered: list[tuple[Path | None, Answered | None]] = []
        for task, pairs in zip(tasks.tasks, tasks.pairs, strict=True):
            place = None
            if keeps and isinstance(self.model, Source):
                place = place_of_answers(self.model, parameter, task, pairs, tasks.tokenizer)
            answered.append((place, None if place is None else read_answers(place, self.note)))
        return answered

    @property
    def questions(self) -> int:
        """The number of steps of tasks that are not yet answered."""
        left = [i for i, (_, known) in enumerate(self.answered) if known is None]
        return 0 if self.tasks is None else sum(map(self.tasks.steps, left))

    def answers(self, step: Callable[[int, str], None]) -> Answered:
        """The reference's answers: cached, or computed and cached where possible. step: as in `ask_tasks`."""
        answers: Answered = []
        for i, (place, known) in enumerate(self.answered):
            if known is None:
                assert self.tasks is not None
                known = ask_task(self.tasks, i, self.network, step)
                if place is not None:
                    keep_answers(place, known, self.note)
            answers += known
        return answers

    def _places(self, asked: Predictor) -> list[Path | None]:
        """The cache files of the outputs on each text; None for all, with a note, where outputs cannot be cached."""
        assert isinstance(self.model, Source)
        why_not = "it brings code of its own, which may change" if self.model.code else asked.why
        if why_not:
            self.note(f"predictions of the original are not cached: {why_not}")
            return [None for _ in self.texts]
        return [place_of(self.model, asked, text.windows) for text in self.texts]

    def _read(self, i: int) -> CachedStates | None:
        place = self.places[i]
        return (
            None
            if place is None or self.head is None
            else read_states(place, self.texts[i].windows, self.head, self.note)
        )

    @contextmanager
    def on(self, i: int) -> Iterator[Predictions]:
        """The reference's outputs on text i: cached, or computed and cached where possible."""
        found, place = self.kept[i], self.places[i]
        if found is not None:
            self.overflow = max(self.overflow, found.overflow, key=_value)
            yield found
            return
        assert self.asked is not None
        with evaluating(self.asked.network), watch_overflow(self.asked.network, noise.own_dtype(self.model)) as seen:
            if place is None:
                yield self.asked
            else:
                with keep_states(self.asked, place, seen, self.note) as says:
                    yield says
                self.kept[i] = self._read(i)
        self.overflow = max(self.overflow, seen, key=_value)

    def floors(self, vocabulary: int, step: Callable[[int], None]) -> list[dict[str, Figure]] | str:
        """The noise floor on every text (`noise`), or the reason why there is none."""
        narrow = noise.own_dtype(self.model)
        if narrow is None:
            return noise.why_none(self.model)
        exact = self.arithmetic == torch.float32
        if isinstance(self.model, Source):
            other = load_predictor(self.model, narrow if exact else torch.float32, self.device)
        else:
            other = noise.exact(self.model)
        floors = []
        for i, text in enumerate(self.texts):
            try:
                with evaluating(other), self.on(i) as own:
                    beside = predictor(other, text.windows)
                    rounded, expected = (beside, own) if exact else (own, beside)
                    halved = narrow == torch.float16
                    measured = measure(rounded, text.windows, vocabulary, expected, step, halved, text.parts)
            except CompressError as error:
                return f"{error}"
            floors.append(measured.figures)
        return floors


def _value(largest: Largest) -> float:
    return largest.value
