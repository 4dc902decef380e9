"""Uploads the output of a run or an export to the Hugging Face hub, with its model card, in one commit."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compress.base.errors import CheckpointError, CompressError, InputError, first_line
from compress.base.regular_files import lies_in
from compress.checkpoint import seal
from compress.checkpoint.files import RECORD
from compress.checkpoint.leftovers import holds
from compress.checkpoint.read.checksums import check_tensors
from compress.checkpoint.read.source import find_source
from compress.checkpoint.write.directory import is_checkpoint
from compress.checkpoint.write.manifest import read_record
from compress.evaluation.report.card import CARD, HUB_ID, card_of_export, card_of_run
from compress.evaluation.report.runs import open_runs

HINTS = {401: "log in with `hf auth login`, or set HF_TOKEN", 403: "use a token that may write there"}


@dataclass(frozen=True)
class Push:
    """An upload.

    repo: owner/name. files: {name: bytes}. card: the text of README.md. left: files of the directory that stay here,
    since no command wrote them. removed: files of the repository that another model had there. url: of the commit;
    None for a dry run.
    """

    repo: str
    files: dict[str, int]
    card: str
    left: list[str]
    removed: list[str]
    url: str | None


def push(
    directory: str | Path,
    repo: str,
    *,
    private: bool = False,
    base_model: str | None = None,
    message: str = "Upload a compressed model",
    overwrite: bool = False,
    dry_run: bool = False,
) -> Push:
    """Upload what a command wrote to a repository of models on the hub, which is made if there is none.

    directory: an output of `quantize`, `prune`, `qat`, `distill` or `export`; all of its files are checked against the
    record first. repo: owner/name. base_model: the name of the original on the hub, for the card; by default that of
    the reference of the evaluation, if it is one. overwrite: replace the model of a repository that holds one.
    dry_run: ask the hub nothing, and upload nothing. A README.md that a person wrote or changed goes as the card,
    otherwise one is made of the run and its evaluation.

    The commit is whole or not made. The token is the one that `hf auth login` stored, or HF_TOKEN.

    Raises InputError for a directory that no command wrote, for names that the hub does not have, and for a repository
    that already holds a model; CheckpointError for files that have changed; CompressError where the hub refuses.
    """
    folder = Path(directory)
    for what, name in (("repository", repo), ("base model", base_model)):
        if name is not None and not HUB_ID.fullmatch(name):
            raise InputError(f"{what} {name!r}; give a name of the hub: owner/name, of letters, digits, '-', '_', '.'")
    record = check_output(folder)
    names = sorted({*record["files"], RECORD} - {CARD})
    left = sorted(p.name for p in folder.iterdir() if p.name not in {*names, CARD} and not holds(p.name, names))
    card = _card(folder, record, repo, base_model)
    files = {name: (folder / name).stat().st_size for name in names} | {CARD: len(card.encode())}
    made = Push(repo, files, card, left, [], None)
    return made if dry_run else _upload(folder, made, private, message, overwrite)


def check_output(folder: Path) -> dict[str, Any]:
    """The record of an output, all of whose files are as they were written."""
    if not is_checkpoint(folder):
        raise InputError(f"{str(folder)!r} is not what compress wrote (no {RECORD} of ours); give such a directory")
    record = read_record(folder)
    if linked := [name for name in (*record["files"], RECORD, CARD) if not lies_in(folder / name, folder)]:
        raise CheckpointError(f"{folder / linked[0]} is, or links to, a file outside of {folder}; copy the file there")
    missing = [name for name in record["files"] if name != CARD and not (folder / name).is_file()]
    if missing:
        raise CheckpointError(f"{folder / missing[0]} is missing ({len(missing)} files in all); write the model again")
    if "export" not in record["identity"]:
        check_tensors(find_source(str(folder)), record.get("tensors"))
    seal.check(folder, record)
    return record


def _card(folder: Path, record: dict[str, Any], repo: str, base_model: str | None) -> str:
    """README.md of the directory, or one that is made of the run or the export."""
    exported = "export" in record["identity"]
    theirs = not seal.is_as_written(folder, record, CARD)
    if (folder / CARD).is_file() and (theirs or (exported and base_model is None)):
        if base_model is not None:
            raise InputError(f"{folder / CARD} is yours and goes as it is; name the base model in it, or move it away")
        return (folder / CARD).read_text(encoding="utf-8", errors="replace")
    if exported:
        return card_of_export(record, repo.partition("/")[2], base_model)
    (run,) = open_runs([str(folder)])
    return card_of_run(run, name=repo.partition("/")[2], place=repo, base_model=base_model)


def _upload(folder: Path, upload: Push, private: bool, message: str, overwrite: bool) -> Push:
    """Make the repository and the commit."""
    import huggingface_hub
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    if huggingface_hub.constants.is_offline_mode():
        raise InputError("HF_HUB_OFFLINE is set, and nothing can be uploaded; unset it, or look with --dry-run")
    hub = huggingface_hub.HfApi()
    with one_line_errors(upload.repo):
        there = set(hub.list_repo_files(upload.repo)) if hub.repo_exists(upload.repo) else set()
        models = sorted(name for name in there if not seal.is_document(name))
        if models and not overwrite:
            raise InputError(f"{upload.repo} already holds {models[0]}; give another repository, or --overwrite")
        removed = [name for name in models if name not in upload.files]
        hub.create_repo(upload.repo, private=private, exist_ok=True)
        content = {name: folder / name for name in upload.files if name != CARD}
        changes = [CommitOperationAdd(name, str(path)) for name, path in content.items()]
        changes.append(CommitOperationAdd(CARD, upload.card.encode()))
        changes += [CommitOperationDelete(name) for name in removed]
        done = hub.create_commit(upload.repo, changes, commit_message=message)
    return Push(upload.repo, upload.files, upload.card, upload.left, removed, str(done.commit_url))


@contextmanager
def one_line_errors(repo: str) -> Iterator[None]:
    """Turns what the hub's client raises into one line."""
    from huggingface_hub.errors import HfHubHTTPError, HTTPError, LocalTokenNotFoundError

    try:
        yield
    except CompressError:
        raise
    except LocalTokenNotFoundError:
        raise InputError("no token of the hub; log in with `hf auth login`, or set HF_TOKEN") from None
    except HfHubHTTPError as error:
        hint = HINTS.get(int(error.response.status_code), "try again later")
        raise CompressError(f"the hub refuses {repo}: {first_line(error)}; {hint}") from None
    except (HTTPError, OSError, RuntimeError) as error:  # RuntimeError: of the client, for an upload that failed
        why = first_line(error.__cause__ or error)
        raise CompressError(f"the upload to {repo} failed, and the hub shows none of it: {why}; try again") from None
