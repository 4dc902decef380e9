"""The table of docs/engines.md is what the stored runs say."""

from places import ROOT

from compress.recipes.studies.engines.engine_table import by_gptqmodel, by_llama_cpp, by_onnxruntime, by_vllm, table


def test_the_table_in_readme_comes_from_stored_runs() -> None:
    assert table() in (ROOT / "docs" / "engines.md").read_text(encoding="utf-8")


def test_cells_say_what_was_found_and_what_was_not_run() -> None:
    rows = [{"title": "w4a16 per group", "cpu": "avx2", "vllm": "refuses"}]
    rows.append({"title": "w4a16 per group", "cpu": "native", "vllm": "runs"})
    assert [by_vllm(rows, [title]) for title in ("w4a16 per group", "w3a16 per group")] == ["runs", "not run"]
    rows += [{"title": "nvfp4", "cpu": cpu, "vllm": end} for cpu, end in (("native", "refuses"), ("emulated", "runs"))]
    assert by_vllm(rows, ["nvfp4"]) == "emulated"
    of_demo = {"model": "demo", "layout": "gptq", "scheme": "w4a16"}
    read = [{**of_demo, "grid": "signed-scale", "layers": 35, "differ": 2}]
    read.append({**of_demo, "grid": "asymmetric", "refused": "why"})
    found = [by_gptqmodel(read, scheme) for scheme in ("w4a16", "w4a16 asymmetric", "w3a16")]
    assert found == ["2 of 35 layers differ", "not in this layout", "not run"]
    ran = [{"model": "demo", "title": "--for llama.cpp --scheme w5a16", "types": {"F16": 1, "Q5_0": 35}}]
    ran.append({"model": "demo", "title": "--for llama.cpp --scheme w8a8", "refused": "why"})
    graphs = [{"model": "demo", "title": "ours, w8a8 dynamic"}, {"model": "demo", "title": "onnxruntime, RTN w4"}]
    assert [by_onnxruntime(graphs, scheme) for scheme in ("w8a8", "w4a16")] == ["runs", "not run"]
    assert [by_llama_cpp(ran, s) for s in ("w5a16", "w8a8", "w4a8")] == ["runs (Q5_0)", "no such type", "not run"]
