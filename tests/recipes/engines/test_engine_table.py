"""README's table of engines is what the stored runs say."""

from places import ROOT

from compress.recipes.studies.engines.engine_table import by_gptqmodel, by_vllm, table


def test_the_table_in_readme_comes_from_stored_runs() -> None:
    assert table() in (ROOT / "README.md").read_text(encoding="utf-8")


def test_cells_say_what_was_found_and_what_was_not_run() -> None:
    rows = [{"title": "w4a16 per group", "cpu": "avx2", "vllm": "refuses"}]
    rows.append({"title": "w4a16 per group", "cpu": "native", "vllm": "runs"})
    assert [by_vllm(rows, [title]) for title in ("w4a16 per group", "w3a16 per group")] == ["runs", "not run"]
    read = [{"scheme": "w4a16", "layout": "gptq", "layers": 35, "differ": 2}]
    assert [by_gptqmodel(read, scheme) for scheme in ("w4a16", "w3a16")] == ["2 of 35 layers differ", "not run"]
