"""A run that is asked to resume and finds its output complete: there is nothing left to do."""

import json
from dataclasses import replace
from pathlib import Path

from torch import nn

from compress.api.job import Result
from compress.api.prepare import prepare
from compress.api.request import Request
from compress.checkpoint.write.directory import Directory, is_checkpoint
from compress.checkpoint.write.manifest import read_record, restored
from compress.errors import InputError
from compress.system.comm import Comm
from compress.system.progress import Reporter, Silent


def completed(request: Request, comm: Comm, reporter: Reporter) -> Result | None:
    """The result of the run of a request that is to be resumed, from its record; None where it is not complete or may
    be replaced, of a model in memory, and with several processes. Raises InputError where another run made the
    output."""
    asked = request.delivery
    wanted = asked.resume and not asked.overwrite and asked.output is not None
    if not wanted or comm.world > 1 or isinstance(request.model, nn.Module):
        return None
    assert asked.output is not None
    output = Path(asked.output).absolute()
    if not is_checkpoint(output):
        return None
    found = read_record(output)
    plain = replace(request, delivery=replace(asked, output=None, resume=False))
    identity = json.loads(json.dumps(prepare(plain, None, comm, Silent()).identity))
    if "bytes" not in found or found["identity"] != identity:
        other = ", ".join(key for key in identity if found["identity"].get(key) != identity[key])
        raise InputError(
            f"{asked.output} exists, complete, of a run that differs ({other or 'its record'}); choose another output "
            "or pass --overwrite"
        )
    Directory(output).tidy()
    reporter.note(f"{asked.output} is complete: nothing of it is left to do")
    return Result(restored(found), output=output, verification=found["verification"])
