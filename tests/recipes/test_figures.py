"""`recipes/studies/figures.py`: the command that stored figures name."""

from pathlib import Path

import compress
from compress.recipes.studies.figures import asked
from compress.recipes.studies.quality import rates


def test_a_stored_command_names_a_script_that_is_there_and_no_folder_of_its_user() -> None:
    words = asked(rates.__file__, ["/home/somebody/a model", "--json", "out.json"]).split()
    assert words == ["python", "recipes/studies/quality/rates.py", "'a", "model'", "--json", "out.json"]
    assert (Path(compress.__file__).resolve().parents[1] / words[1]).is_file()
