"""Dense blocks: any format against the values that it stands for, the choice between them and the loops, its file."""

import ctypes
import json
import os
import stat

import pytest
import torch
from combinations import every, pairs
from planar import TABLES, inputs, planar_of, table_of
from sums import entries_of, rows_of, tiles_of

from compress.base.errors import InputError
from compress.kernels import reference
from compress.kernels.cpu import build as cpu
from compress.kernels.cpu import dense, dense_thresholds, direct, processor
from compress.kernels.cpu import gemm as cpu_gemm
from compress.kernels.cpu.arguments import FEW_TOKENS, Arguments
from compress.kernels.layouts import strips
from compress.kernels.layouts import tiles as pack_tiles
from compress.kernels.layouts import words as pack
from compress.kernels.layouts.strips import pack_strips
from compress.kernels.layouts.strips24 import pack_pairs, pack_words24
from compress.kernels.operators import words as ops
from compress.kernels.routes import AMX_BLOCKS, DENSE_BLOCKS, NOT_MEASURED, strips_route, with_entries

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
GROUPS = [(32, 32), (96, 32), (200, -1), (640, 128), (1088, 544)]
CPU = torch.device("cpu")
LARGE = (256, 256)  # the least weight that is not left to the loops


@pytest.fixture(autouse=True)
def measured(monkeypatch):
    """Lets dense blocks be measured."""
    monkeypatch.delenv(dense.SETTING)
    if dense.why_not():
        pytest.skip("; ".join(dense.why_not()))


NATIVE = cpu.flags_for("native")
FLAGS = {"torch": NATIVE, "amx": NATIVE, "emulated tiles": (*NATIVE, "-DEMULATED_TILES"), "avx2": cpu.flags_for("avx2")}


@pytest.fixture(scope="module", params=FLAGS)
def compiled(request):
    """The library of dense blocks for this processor, multiplied by torch, by AMX or by what stands for it in C++; and
    for a processor without AVX-512."""
    if cpu.why_not():
        pytest.skip("; ".join(cpu.why_not()))
    found, reasons = cpu.load_from_a_place("dense", FLAGS[request.param])
    assert found is not None, reasons
    by_tiles = bool(found.dense_amx(request.param in ("amx", "emulated tiles")))
    if request.param == "amx" and not by_tiles:
        pytest.skip("this CPU, its kernel or the compiler has no AMX")
    assert by_tiles == (request.param in ("amx", "emulated tiles"))
    found.by_tiles = by_tiles
    yield found
    found.dense_amx(True)


@pytest.fixture
def blocks(compiled, monkeypatch):
    """Computes every product by dense blocks, whatever its sizes, on outputs that are NaN before."""

    def taken(name, filled):
        return compiled.dense_product(ctypes.byref(filled), dense.OPERATIONS[name]) == dense.DONE

    monkeypatch.setattr(cpu_gemm, "FEW_TOKENS", 0)
    monkeypatch.setattr(cpu_gemm, "FEW_WEIGHTS", 0)
    monkeypatch.setattr(dense, "taken", taken)
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda self, *shape: torch.full(shape, torch.nan, dtype=self.dtype))
    return compiled


def good(out, x, values, bias):
    """True for a result within the tolerance of a kernel that rounds its weights."""
    given, weight = x.double(), values.double()
    truth = given @ weight.t() + (0 if bias is None else bias.double())
    allowed = reference.tolerance(given, weight, truth, x.dtype) + reference.weight_rounding(given, weight, x.dtype)
    return out.dtype == x.dtype and bool(((out.double() - truth).abs() <= allowed).all())


# --- every format --------------------------------------------------------------------------------------------------


@every("dtype", DTYPES)
@every("bits", [4, 8])
@every(("K", "group"), GROUPS)
def test_words_and_strips(blocks, K, group, bits, dtype):
    for N, symmetric, M in ((1, True, 1), (15, False, 9), (100, False, 17)):
        weight, values = planar_of(N, K, bits, group, symmetric, dtype)
        x, bias = inputs(M, K, N, dtype)
        assert good(cpu_gemm.words(x, weight, bias), x, values, bias), (N, M)
    for N, symmetric, M in ((16, True, 1), (80, False, 17), (48, True, 9)):
        weight, values = planar_of(N, K, bits, group, symmetric, dtype)
        x, bias = inputs(M, K, N, dtype)
        assert good(cpu_gemm.words(x, pack_strips(weight, K), None), x, values, None), (N, M)
        assert good(cpu_gemm.words(x, pack_strips(weight, K), bias.float()), x, values, bias.float()), (N, M)


@every("dtype", DTYPES)
@every("bits", [4, 8])
def test_sparse_rows_beside_codes(blocks, bits, dtype):
    for N, K, share, other in ((48, 96, 0.01, torch.float32), (80, 640, 0.3, torch.bfloat16), (16, 200, 1.0, dtype)):
        weight, values = planar_of(N, K, bits, -1, False, dtype)
        entries, extra = entries_of(N, K, share, other)
        x, bias = inputs(17, K, N, dtype)
        for out in (
            cpu_gemm.words(x, weight, bias, entries=entries),
            cpu_gemm.words(x, pack_strips(weight, K), bias, entries=entries),
        ):
            # An entry is rounded once more, with the code that it is added to.
            apart = reference.weight_rounding(x.double(), extra.double().abs() + values.abs(), dtype)
            truth = x.double() @ (values + extra).t() + bias.double()
            allowed = reference.tolerance(x.double(), values.abs() + extra.abs(), truth, dtype) + 2 * apart
            assert ((out.double() - truth).abs() <= allowed).all(), (N, K)


@every("dtype", DTYPES)
@every(("group", "bits", "level_bits", "rows"), [(16, 3, 3, 16), (32, 2, 8, 1), (48, 6, 5, 3), (80, 8, 4, 64)])
def test_tiles(blocks, group, bits, level_bits, rows, dtype):
    for N, groups in ((16, 1), (80, 13)):
        weight = tiles_of(N, group * groups, bits, group, rows, level_bits, dtype)
        x, bias = inputs(9, group * groups, N, dtype)
        out = cpu_gemm.tiles(x, pack_tiles.pack_tile_strips(weight, group * groups), bias)
        assert good(out, x, pack_tiles.tile_weight(weight, group * groups), bias), N


@every("dtype", DTYPES)
@every(("K", "group"), [(32, 32), (64, 16), (200, -1), (640, 128)])
def test_tables(blocks, K, group, dtype):
    for table in TABLES:
        laid, _ = table_of(48, K, group, table, dtype)
        given = laid.table.values
        levels = given[:16].double()
        x, bias = inputs(9, K, 48, dtype)
        codes = pack.unpack_planar(strips.unpack_strips(laid, K).words, 4, K)
        scale_NK = strips.unpack_strips(laid, K).scale.double().t().repeat_interleave(K // laid.scale.shape[1], 1)
        values = levels[codes.int()] * scale_NK * given[16].double()
        assert good(cpu_gemm.words(x, laid, bias), x, values, bias), table


@every("dtype", DTYPES)
@every("kind", ["numbers", "eight", "four"])
@every(("K", "group"), [(32, 32), (100, -1), (288, 96), (640, 128)])
def test_two_of_four(blocks, K, group, kind, dtype):
    for N, zero in ((16, True), (80, False)):
        rows, values = rows_of(kind, N, K, group, zero, dtype)
        laid = pack_words24(rows, K) if kind == "four" else pack_pairs(rows)
        x, bias = inputs(9, K, N, dtype)
        assert good(cpu_gemm.strips24(x, laid, bias), x, values, bias), N


@every("input_group", [-1, 128])
@every("bits", [4, 8])
@every(("K", "group"), GROUPS)
def test_inputs_rounded_to_int8(blocks, K, group, bits, input_group):
    for N, symmetric, M in ((16, True, 9), (80, False, 17)):
        weight, values = planar_of(N, K, bits, group, symmetric, torch.bfloat16)
        x, bias = inputs(M, K, N, torch.bfloat16)
        codes, scale_MB = reference.quantize_token_blocks(x, input_group)
        given = codes.double() * scale_MB.double().repeat_interleave(K if input_group == -1 else input_group, 1)[:, :K]
        truth = given @ values.t() + bias.double()
        # Weights and inputs are rounded to bfloat16.
        allowed = reference.tolerance(given, values, truth, x.dtype)
        allowed += 2**0.5 * reference.weight_rounding(given, values, x.dtype)
        found = [cpu_gemm.words(x, weight, bias, input_group)]
        found += [cpu_gemm.words(x, pack_strips(weight, K), bias, input_group)] if bits == 4 else []
        for out in found:
            assert ((out.double() - truth).abs() <= allowed).all(), (N, symmetric)


@every("input_group", [-1, 128])
@every(("bits", "K", "group"), [(4, 200, -1), (4, 256, 64), (4, 2176, 128), (8, 200, -1), (8, 640, 128)])
def test_int8_inputs_meet_codes_that_are_not_rounded(blocks, bits, K, group, input_group, monkeypatch):
    """By tiles alone; of 2,176 columns, in two chunks."""
    if not blocks.by_tiles:
        pytest.skip("without tiles, weights and inputs are rounded to bfloat16 here")
    M = 497 if K == 2176 else 17
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    for N in (16, 80, 100):
        weight, values = planar_of(N, K, bits, group, bits == 8, torch.bfloat16)
        x, bias = inputs(M, K, N, torch.bfloat16)
        codes, scale_MB = reference.quantize_token_blocks(x, input_group)
        given = codes.double() * scale_MB.double().repeat_interleave(K if input_group == -1 else input_group, 1)[:, :K]
        truth = given @ values.double().t() + bias.double()
        found = [cpu_gemm.words(x, weight, bias, input_group)]
        found += [cpu_gemm.words(x, pack_strips(weight, K), bias, input_group)] if bits == 4 and N % 16 == 0 else []
        for out in found:
            assert (
                (out.double() - truth).abs() <= reference.tolerance(given, values.double(), truth, x.dtype)
            ).all(), N


@every(("static", "symmetric", "dtype"), pairs([True, False], [True, False], DTYPES))
def test_rows_of_int8_are_the_reference_bit_for_bit(blocks, static, symmetric, dtype):
    for N, K, M in ((1, 50, 1), (48, 96, 9), (100, 640, 17)):
        g = torch.Generator().manual_seed(K + N)
        weight, scale = torch.randint(-128, 128, (N, K), generator=g, dtype=torch.int8), torch.rand(N, generator=g)
        row_sum, (x, bias) = reference.row_sums(weight), inputs(M, K, N, dtype)
        x_scale, x_zero = torch.tensor([0.03]), None if symmetric else torch.tensor([5], dtype=torch.int32)
        codes = reference.quantize_static(x, x_scale, x_zero)
        if not static:
            codes, x_scale, x_zero = reference.quantize_tokens(x, symmetric)
        expected = reference.w8a8(codes, x_scale, x_zero, weight, scale, bias, dtype)
        fixed = (x_scale, x_zero) if static else (None, None)
        out = cpu_gemm.w8a8(x, weight, scale, None if symmetric else row_sum, bias, *fixed, symmetric)
        assert torch.equal(out, expected), (N, K, M)


def test_chunks_of_columns_and_shares_of_rows(blocks, monkeypatch):
    """Of tiles: two chunks, between which sums wait in memory, a share for each thread, a last tile of one token; and
    entries, of which every chunk adds its own."""
    N, K, M = 80, 1248, 497
    weight, values = planar_of(N, K, 4, 96, False, torch.bfloat16)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    entries, extra = entries_of(N, K, 0.01, torch.bfloat16)
    x, bias = inputs(M, K, N, torch.bfloat16)
    for laid in (pack_strips(weight, K), weight):
        multiply = cpu_gemm.words
        assert good(multiply(x, laid, bias), x, values, bias)
        assert good(multiply(x, laid, bias, entries=entries), x, values + extra, bias)


def test_several_blocks_of_tokens(blocks):
    weight, values = planar_of(48, 160, 8, 32, False, torch.bfloat16)
    x, bias = inputs(1100, 160, 48, torch.bfloat16)
    assert good(cpu_gemm.words(x, pack_strips(weight, 160), bias), x, values, bias)


def test_several_blocks_and_threads(blocks):
    """More rows than a panel holds, the last block not full, two threads."""
    N, K = 1040, 4096
    weight, values = planar_of(N, K, 4, 128, False, torch.bfloat16)
    x, bias = inputs(9, K, N, torch.bfloat16)
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        try:
            found.append(cpu_gemm.words(x, pack_strips(weight, K), bias))
        finally:
            torch.set_num_threads(1)
        assert good(found[-1], x, values, bias)


# --- the choice ----------------------------------------------------------------------------------------------------


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """Nothing was measured yet; `asked` counts measurements, which answer `asked.tokens`."""
    calls: list[str] = []

    def answer(filled, loop):
        calls.append(dense.kind_of(dense.operation_of(filled, loop), filled))
        return answer.tokens

    answer.tokens, answer.calls, answer.path = 10, calls, tmp_path / "routes-1.json"
    monkeypatch.setattr(dense, "measured", answer)
    monkeypatch.setattr(dense_thresholds, "file", lambda: answer.path)
    monkeypatch.setattr(dense, "_tried", [])
    monkeypatch.setattr(direct, "product", lambda *_: None)  # tests call the operators of C++ themselves
    dense._library.cache_clear()
    yield answer
    dense._library.cache_clear()
    dense._library()  # forgets what this test has answered


def large(dtype=torch.bfloat16):
    weight, values = planar_of(*LARGE, 4, 128, False, dtype)
    return weight, pack_strips(weight, LARGE[1]), values


def by_blocks(M, product):
    """(True if a product of M tokens is the one by dense blocks, True if it is that of the loops): bit for bit."""
    x, _ = inputs(M, LARGE[1], LARGE[0], torch.bfloat16)
    found = product(x)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dense, "taken", lambda *_: False)
        loops = ops.words_linear(x, *large()[1][:3], None, 4, 128, None)
    return not torch.equal(found, loops)


def test_few_tokens_are_left_to_the_loops_and_one_measurement_serves_all(asked):
    _, laid, _ = large()
    operator = lambda x: ops.words_linear(x, *laid[:3], None, 4, 128, None)  # noqa: E731
    assert not by_blocks(FEW_TOKENS, operator)
    assert asked.calls == []
    assert not by_blocks(FEW_TOKENS + 1, operator)
    assert by_blocks(10, operator)
    assert by_blocks(300, operator)
    assert len(asked.calls) == 1
    # Another process finds the figure in the file, and measures nothing.
    dense._library.cache_clear()
    asked.tokens = 10**6
    assert by_blocks(300, operator)
    assert len(asked.calls) == 1
    stored = json.loads(asked.path.read_text())
    assert list(stored["from"].values()) == [10]
    assert stat.S_IMODE(os.stat(asked.path).st_mode) == 0o600


def test_batch_invariant_products_are_left_to_the_loops(asked):
    _, laid, _ = large()
    x, _ = inputs(300, LARGE[1], LARGE[0], torch.bfloat16)
    out = ops.words_linear(x, *laid[:3], None, 4, 128, None, True)
    assert torch.equal(out[:9], ops.words_linear(x[:9], *laid[:3], None, 4, 128, None, True))
    assert asked.calls == []


def test_the_operator_of_cpp_takes_them_too(asked):
    if direct.why_not():
        pytest.skip("; ".join(direct.why_not()))
    try:
        direct.use(cpu.library())
        _, laid, values = large()
        for M in (9, 10, 300, 300):
            x, _ = inputs(M, LARGE[1], LARGE[0], torch.bfloat16)
            expected = ops.words_linear(x, *laid[:3], None, 4, 128, None)
            assert torch.equal(direct.operators.cpu_linear(x, *laid[:3], None, 4, 128, None), expected)
            assert good(expected, x, values, None)
        assert len(asked.calls) == 1
    finally:
        os.environ[dense.SETTING] = "never"
        direct.use(cpu.library())
        del os.environ[dense.SETTING]


def test_experts_take_them_by_their_own_tokens(asked):
    if direct.why_not():
        pytest.skip("; ".join(direct.why_not()))
    try:
        direct.use(cpu.library())
        _, laid, _ = large()
        stacked = [part if part is None else torch.stack([part, part]) for part in laid[:3]]
        x, _ = inputs(300, LARGE[1], LARGE[0], torch.bfloat16)
        start = torch.tensor([0, 4, 300], dtype=torch.int32)
        out = direct.operators.cpu_experts(x, *stacked, None, None, start, 4, 128, None)
        for rows in (slice(0, 4), slice(4, 300)):
            assert torch.equal(out[rows], ops.words_linear(x[rows], *laid[:3], None, 4, 128, None))
        assert len(asked.calls) == 1
    finally:
        os.environ[dense.SETTING] = "never"
        direct.use(cpu.library())
        del os.environ[dense.SETTING]


@every(("ratios", "expected"), [
    ({64: 0.8, 32: 0.9, 16: 1.0}, 32),
    ({64: 0.8, 32: 1.1}, 64),
    ({64: 0.5, 32: 0.5, 16: 0.5, 8: 0.5, 4: 0.5}, 4),
    ({64: 1.2, 512: 0.9, 256: 0.95, 128: 0.98}, 256),
    ({64: 1.2, 512: 0.98}, dense.NEVER),
    ({64: 2.1}, dense.NEVER),
])  # fmt: skip
def test_the_least_number_of_tokens_that_gains_is_found(monkeypatch, ratios, expected):
    class Trial:
        def __init__(self, given, loop):
            pass

        def agrees(self):
            return True

        def ratio(self, M):
            return ratios.pop(M)

    ratios = dict(ratios)
    monkeypatch.setattr(dense, "_Trial", Trial)
    assert dense.measured(None, "weight_only") == expected
    assert ratios == {}


def test_a_measurement_compares_both_ways(monkeypatch):
    _, laid, _ = large()
    x, _ = inputs(9, LARGE[1], LARGE[0], torch.bfloat16)
    seen = []
    monkeypatch.setattr(dense, "taken", lambda name, filled: seen.append(Arguments.from_buffer_copy(filled)))
    cpu_gemm.words(x, laid)
    (filled,) = seen
    trial = dense._Trial(filled, "weight_only")
    assert trial.agrees()
    assert trial.ratio(16) > 0
    assert dense.measured(filled, "weight_only") in (*dense.TRIED, dense.NEVER)
    # Dense blocks that are wrong are never taken.
    monkeypatch.setattr(trial, "run", lambda wrong, M: trial.out.fill_(1.0 if wrong else 2.0))
    assert not trial.agrees()
    monkeypatch.setattr(dense, "_Trial", lambda *_: trial)
    assert dense.measured(filled, "weight_only") == dense.NEVER


def test_the_number_of_tokens_can_be_set(monkeypatch):
    for value, tokens in (("64", 64), ("1", 1), ("never", dense.NEVER)):
        monkeypatch.setenv(dense.SETTING, value)
        assert dense.setting() == tokens
    for value in ("0", "-3", "always", "1.5"):
        monkeypatch.setenv(dense.SETTING, value)
        with pytest.raises(InputError, match=f"{dense.SETTING}={value}; allowed: a number of tokens"):
            dense.why_not()


def test_amx_can_be_left_to_torch(monkeypatch):
    paths = {dense_thresholds.file()}
    monkeypatch.setenv(processor.AMX_SETTING, "0")
    assert not dense.by_amx("strips", torch.bfloat16)
    assert dense_thresholds.file() not in paths
    monkeypatch.setenv(processor.AMX_SETTING, "1")
    assert dense_thresholds.file() in paths
    assert not dense.by_amx("strips", torch.float32)
    for operation, dtype in (("strips", torch.bfloat16), ("w8a8", torch.float32)):
        assert dense.by_amx(operation, dtype) == bool(dense._library().dense_amx(True))
    monkeypatch.setenv(processor.AMX_SETTING, "off")
    with pytest.raises(InputError, match="COMPRESS_CPU_AMX=off; allowed: 0, 1, or leave it out"):
        dense.why_not()


def test_a_damaged_file_is_measured_anew(tmp_path):
    path = tmp_path / "routes-1.json"
    for content in ("", "[]", '{"from": 3}', '{"from": {"kind": "many"}}'):
        path.write_text(content)
        assert dense_thresholds.read(path) == {}
        assert dense_thresholds.found_or_measured(path, "kind", lambda: 64) == 64
        assert dense_thresholds.found_or_measured(path, "kind", pytest.fail) == 64
    assert dense_thresholds.found_or_measured(path, "other", lambda: dense.NEVER) == dense.NEVER
    assert dense_thresholds.read(path) == {"kind": 64, "other": dense.NEVER}
    path.chmod(0o666)  # anybody could have written it
    assert dense_thresholds.read(path) == {}


def test_routes_say_what_was_measured(asked):
    route = lambda M: strips_route(M, *LARGE, 4, 128, torch.bfloat16, CPU)  # noqa: E731
    loop = route(FEW_TOKENS).kernel
    assert route(1) == route(FEW_TOKENS) == (loop, ())
    assert route(64).why_not == (NOT_MEASURED,)
    x, _ = inputs(9, LARGE[1], LARGE[0], torch.bfloat16)
    ops.words_linear(x, *large()[1][:3], None, 4, 128, None)
    assert route(9) == (route(9).kernel, ())
    assert dense.told() == [f"dense blocks are faster from 10 tokens on: {asked.calls[0]}"]
    blocks = AMX_BLOCKS if dense.by_amx("pair_strips", torch.bfloat16) else DENSE_BLOCKS
    assert route(64) == (blocks, (f"{DENSE_BLOCKS} from 10 tokens on, measured to be faster here",))
    assert with_entries(route(64), 64).kernel == f"{blocks} with entries"
    # Smaller weights are left to the loops.
    assert strips_route(64, 128, 256, 4, 128, torch.bfloat16, CPU).kernel not in (DENSE_BLOCKS, AMX_BLOCKS)


def test_entries_beside_codes_share_the_measurement(asked):
    _, laid, values = large()
    entries, extra = entries_of(*LARGE, 0.01, torch.bfloat16)
    x, _ = inputs(17, LARGE[1], LARGE[0], torch.bfloat16)
    out = ops.words_linear(x, *laid[:3], None, 4, 128, None, False, None, False, *entries)
    assert good(out, x, values + extra, None)
    ops.words_linear(x, *laid[:3], None, 4, 128, None)
    assert len(asked.calls) == 1
