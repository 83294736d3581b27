"""benchmarks/gpu.py: nothing that one part does takes the others down, and every part's code runs
at toy sizes on a CPU."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import outside_ranks
import psutil
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

from gpu_parts import devices, environment, sampling, training, whole_runs, workload  # noqa: E402
from gpu_parts.catalogue import PARTS, Part, find_part  # noqa: E402
from gpu_parts.record import Context, Record, Skipped  # noqa: E402
from gpu_parts.report import read_results, to_markdown, write_report  # noqa: E402
from gpu_parts.runner import (  # noqa: E402
    Settings,
    missing_modules,
    result_path,
    run_inside,
    run_part,
)
from gpu_parts.sizes import FULL, MODELS, TOY, make_recipe  # noqa: E402

from grpo_replay.engine.models import load_policy  # noqa: E402
from grpo_replay.engine.policy_module import PolicyModule  # noqa: E402
from grpo_replay.lab.dry_run.memory import ModelShape  # noqa: E402

PART = Part(1, "a part", "nowhere:nothing", ())


# A part in a process of its own


def run_script(script: str, output: Path, seconds: float = 60.0) -> dict:
    """A part that notes one figure and then does what the script says."""
    start = f"""
        import os, signal, subprocess, sys, time
        from pathlib import Path
        from gpu_parts.record import Record
        record = Record(Path({str(result_path(output, 1))!r}), 1, "a part", "toy")
        record.figure("found", 3)
    """
    program = textwrap.dedent(start) + textwrap.dedent(script)
    settings = Settings(output, toy=True, part_seconds=seconds)
    return run_part(PART, settings, [sys.executable, "-c", program])


def test_a_part_that_ends_well_keeps_its_result_and_is_timed(tmp_path):
    result = run_script("record.finish('ok'); print('a line')", tmp_path)
    assert (result["status"], result["reason"], result["stdout_lines"]) == ("ok", None, 1)
    assert 0 < result["seconds"] < 60 and result["figures"] == {"found": 3}
    assert read_results(tmp_path) == [result]


def test_a_part_that_crashes_fails_and_keeps_what_it_had_found(tmp_path):
    script = (
        "print('last words', file=sys.stderr, flush=True); os.kill(os.getpid(), signal.SIGSEGV)"
    )
    result = run_script(script, tmp_path)
    assert result["status"] == "failed" and result["figures"] == {"found": 3}
    assert result["reason"] == f"the process ended with {-signal.SIGSEGV}"
    assert "last words" in result["traceback"]


def test_a_part_that_crashes_after_its_result_has_failed(tmp_path):
    result = run_script("record.finish('ok'); os._exit(3)", tmp_path)
    assert result["status"] == "failed"
    assert result["reason"] == "the process ended with 3, after its last result"


@pytest.mark.slow
def test_a_part_that_hangs_is_ended_with_all_its_processes(tmp_path):
    script = f"""
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        Path({str(tmp_path)!r}, "child").write_text(str(child.pid))
        time.sleep(600)
    """
    result = run_script(script, tmp_path, seconds=3.0)
    assert result["status"] == "failed" and result["reason"] == "no end after 3 s"
    assert result["figures"] == {"found": 3}
    child = int((tmp_path / "child").read_text())
    deadline = time.monotonic() + 10
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the part's child still runs"
        time.sleep(0.05)


def test_the_work_folder_of_a_part_is_removed(tmp_path):
    result = run_script("record.figure('cwd', os.getcwd()); record.finish('ok')", tmp_path)
    assert not Path(result["figures"]["cwd"]).exists()


# What a part says


def inside(tmp_path, monkeypatch, action, part=PART) -> dict:
    monkeypatch.setattr(Part, "load", lambda self: action)
    run_inside(part, Settings(tmp_path, toy=True), tmp_path)
    return json.loads(result_path(tmp_path, part.number).read_text())


def test_a_part_skips_what_it_cannot_do_and_says_why(tmp_path, monkeypatch):
    def skip(context):
        raise Skipped("no disk")

    result = inside(tmp_path, monkeypatch, skip)
    assert (result["status"], result["reason"]) == ("skipped", "no disk")
    needy = dataclasses.replace(PART, needs=("json", "no_such_package"))
    result = inside(tmp_path, monkeypatch, skip, needy)
    assert (result["status"], result["reason"]) == ("skipped", "not installed: no_such_package")


def test_an_error_and_a_claim_that_does_not_hold_fail_a_part(tmp_path, monkeypatch):
    def raise_error(context):
        raise ValueError("the third\nreason")

    result = inside(tmp_path, monkeypatch, raise_error)
    assert (result["status"], result["reason"]) == ("failed", "ValueError: the third")
    assert "raise_error" in result["traceback"]

    def claim(context):
        context.record.check("true", True)
        context.record.check("two is three", False, found=2)

    result = inside(tmp_path, monkeypatch, claim)
    assert (result["status"], result["reason"]) == ("failed", "not so: two is three")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_the_full_size_is_skipped_except_for_the_first_part(tmp_path):
    for part in PARTS[1:]:
        run_inside(dataclasses.replace(part, needs=()), Settings(tmp_path), tmp_path)
    results = read_results(tmp_path)
    assert len(results) == 19
    assert all(result["status"] == "skipped" for result in results)
    assert all("no CUDA device" in result["reason"] for result in results)
    assert PARTS[0].anywhere and not any(part.anywhere for part in PARTS[1:])


def test_a_part_for_two_gpus_is_skipped_beside_one(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    part = dataclasses.replace(PART, gpus=2)
    run_inside(part, Settings(tmp_path), tmp_path)
    (result,) = read_results(tmp_path)
    assert (result["status"], result["reason"]) == ("skipped", "needs 2 GPUs, and there is 1")
    assert [part.number for part in PARTS if part.gpus > 1] == [16, 17, 18, 19]


@pytest.mark.slow
def test_the_command_runs_the_parts_asked_for_and_writes_the_report(tmp_path):
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), "--output", str(tmp_path)]
    done = subprocess.run(
        [*command, "--part", "12"], capture_output=True, text=True, check=False,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "part 12 of 20" in done.stdout and "skipped" in done.stdout
    assert [result["part"] for result in read_results(tmp_path)] == [12]
    assert json.loads((tmp_path / "report.json").read_text())[0]["status"] == "skipped"
    assert "one step beside TRL's" in (tmp_path / "report.md").read_text()
    done = subprocess.run([*command, "--part", "21"], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "there are parts 1 to 20" in done.stderr


def test_every_part_leads_to_a_function():
    assert [part.number for part in PARTS] == list(range(1, 21))
    assert all(callable(part.load()) for part in PARTS)


# The report


def write_part(output: Path, number: int, title: str = "title") -> Record:
    return Record(result_path(output, number), number, title, "toy")


def test_the_report_holds_all_parts_of_the_folder_and_one_table_of_training_steps(tmp_path):
    for number, model in ((9, "small"), (10, "large")):
        record = write_part(tmp_path, number)
        record.row("packs", {"model": model, "pack_tokens": 2048, "mfu_percent": 41.234})
        record.finish("ok")
    write_part(tmp_path, 2).finish("skipped", "a | b\nc")
    write_report(tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert [line for line in text.splitlines() if line.startswith(("| small", "| large"))] == [
        "| small | 2,048 | 41.23 |", "| large | 2,048 | 41.23 |",
    ]  # fmt: skip
    assert "| 2 | title | toy | skipped | – |  | – | a \\| b c |" in text
    assert len(json.loads((tmp_path / "report.json").read_text())) == 3


def test_rows_with_different_columns_share_one_table(tmp_path):
    record = write_part(tmp_path, 3)
    record.row("t", {"a": 1, "b": 1234.5})
    record.row("t", {"a": None, "c": True})
    lines = to_markdown([record.result]).splitlines()
    assert "| a | b | c |" in lines and "| 1 | 1,234 | – |" in lines and "| – | – | yes |" in lines


# What is computed


def test_the_operations_of_a_training_step_by_hand():
    shape = ModelShape(
        parameters=1_000 + 10 * 20, largest_parameter=0, tied_head=True,
        layers=3, hidden=10, vocabulary=20, kv_elements_per_token=0, attention_width=16,
        max_positions=None,
    )  # fmt: skip
    flops = devices.training_flops(shape, [4, 6], completion_tokens=7)
    assert flops == 6 * 1_000 * 10 + 6 * 200 * 7 + 6 * 3 * 16 * (16 + 36)
    untied = dataclasses.replace(shape, parameters=1_000 + 2 * 200, tied_head=False)
    assert devices.training_flops(untied, [4, 6], completion_tokens=7) == flops


def test_the_operations_are_those_that_torch_counts():
    recipe = make_recipe(
        TOY, prompt=8, completion=56, pack=128,
        model={"attn_implementation": "eager", "dtype": "float32", "gradient_checkpointing": False},
    )  # fmt: skip
    shape = training.shape_of(recipe)
    policy = PolicyModule(load_policy(recipe.model, 0).train(), 1.0, 10**6)
    rows, length, completion = 2, 64, 56
    ids = torch.randint(0, 2048, (rows, length))
    positions = torch.cat([torch.arange(7, 63), 64 + torch.arange(7, 63)])
    with FlopCounterMode(display=False) as counter:
        policy(ids, positions, ids.flatten()[positions + 1])[0].sum().backward()
    ours = devices.training_flops(shape, [length] * rows, rows * completion)
    upper_triangle = 6 * shape.layers * shape.attention_width * rows * length**2
    assert counter.get_total_flops() == pytest.approx(ours + upper_triangle, rel=0.005)


def test_the_peak_rate_is_the_given_one_or_the_tables():
    names = ("NVIDIA H200", "NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "NVIDIA A100-SXM4-80GB")
    assert [devices.peak_tflops(name, None) for name in names] == [989, 989, 756, 312]
    assert devices.peak_tflops("a GPU of next year", None) is None
    assert devices.peak_tflops("NVIDIA H200", 500.0) == 500


def test_free_memory_on_a_cpu_falls_by_what_this_process_takes():
    before = devices.free_gib("cpu")
    held = torch.ones(2**26)  # 0.25 GiB
    assert before - devices.free_gib("cpu") == pytest.approx(0.25, abs=0.05), held.sum()


def test_packs_are_full_and_two_to_an_update():
    for size in (FULL, TOY):
        shape = training.shape_of(training.row_recipe(size, MODELS[0], min(size.packs)))
        for pack in size.packs:
            recipe = training.row_recipe(size, MODELS[0], pack)
            rows, lengths = training.pack_rows(recipe, shape)
            assert sum(lengths) == 2 * pack and recipe.batch.max_tokens_per_microbatch == pack
            assert [row.length_tokens for row in rows] == lengths


# Parts in this process, at toy size


def context(tmp_path: Path, **changes) -> Context:
    size = dataclasses.replace(TOY, updates=2, **changes)
    record = Record(tmp_path / "part_02.json", 2, "a part", size.name)
    return Context(size, record, tmp_path, peak_tflops=1.0)


@pytest.mark.slow
def test_the_chunks_part_compares_equal_gradients(tmp_path):
    found = context(tmp_path)
    training.compare_chunks(found)
    checks = found.record.result["checks"]
    assert len(checks) == 3 and all(check["holds"] for check in checks), checks
    small, large = found.record.result["tables"]["chunks"]
    assert (small["chunk_tokens"], large["chunk_tokens"]) == TOY.chunks
    assert small["predicted_gib"] < large["predicted_gib"]


@pytest.mark.slow
def test_the_training_part_measures_every_pack_and_the_push_after_it(tmp_path, monkeypatch):
    """The peak is given: a process that has run large tests may need no new page here."""
    monkeypatch.setattr(devices.PeakMemory, "read", lambda _: {"peak_gib": 0.5})
    found = context(tmp_path, packs=(64, 256))
    training.measure_1_7b(found)
    result = found.record.result
    assert all(check["holds"] for check in result["checks"]) and len(result["checks"]) == 1
    rows = result["tables"]["packs"]
    assert [row["rows"] for row in rows] == ["1 x 64", "4 x 64"]
    for row, pack in zip(rows, (64, 256), strict=True):
        assert row["tokens_per_second"] == pytest.approx(2 * pack / row["seconds"])
        assert row["mfu_percent"] == pytest.approx(100 * row["tflops"])  # of 1 TFLOP/s
        assert row["peak_gib"] == 0.5 and row["predicted_gib"] > 0
        off = 100 * (row["predicted_gib"] / 0.5 - 1)
        assert row["prediction_off_percent"] == pytest.approx(off)


@pytest.mark.slow
def test_out_of_memory_ends_the_table_and_not_the_part(tmp_path, monkeypatch):
    whole = training.measure_pack

    def full_above_64(engine, recipe, *rest):
        if recipe.batch.max_tokens_per_microbatch > 64:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return whole(engine, recipe, *rest)

    monkeypatch.setattr(training, "measure_pack", full_above_64)
    found = context(tmp_path)
    training.measure_0_6b(found)
    rows = found.record.result["tables"]["packs"]
    assert [row.get("out_of_memory") for row in rows] == [None, True]
    assert rows[1]["predicted_gib"] > 0
    assert "packs of 128 tokens" in found.record.result["notes"][0]


@pytest.mark.slow
def test_other_micro_batches_than_reported_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(training, "pack_rows", lambda recipe, shape: (rows, lengths))
    recipe = training.row_recipe(TOY, MODELS[0], 64)
    lengths = [64] * 3
    rows = workload.random_rows(lengths, recipe.prompts.max_prompt_length, 2048)
    with pytest.raises(RuntimeError, match="3 micro-batches of an update, expected 2"):
        training.measure_0_6b(context(tmp_path))


def test_the_cuda_paths_call_what_torch_has(tmp_path, monkeypatch):
    """A device that answers as an H200 would; every name that is patched must exist in torch."""
    gib = 2**30
    answers = {
        "is_available": True, "device_count": 1, "get_device_name": "NVIDIA H200",
        "get_device_capability": (9, 0), "mem_get_info": (100 * gib, 140 * gib),
        "is_bf16_supported": True, "memory_allocated": gib, "max_memory_allocated": 2 * gib,
        "max_memory_reserved": 3 * gib, "reset_peak_memory_stats": None, "empty_cache": None,
        "synchronize": None,
    }  # fmt: skip
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 5))
    found = context(tmp_path)
    environment.examine_gpu(found)
    figures = found.record.result["figures"]
    assert figures["GPU"] == "NVIDIA H200" and figures["NCCL"] == "2.27.5"
    assert (figures["GPU memory, GiB"], figures["GPU memory free, GiB"]) == (140, 100)
    meter = devices.PeakMemory("cuda")
    meter.reset()
    assert meter.read() == {"peak_gib": 2, "reserved_gib": 3}
    assert devices.allocated_gib("cuda") == 1 and devices.free_gib("cuda") == 100
    assert devices.device_capacity("cuda") == 140 * gib
    recipe = training.row_recipe(FULL, MODELS[2], 32_768)
    assert 60 < training.predicted_memory(recipe, "cuda").at_rest / gib < 120
    assert training.timed("cuda", lambda: 5)[0] == 5


@pytest.mark.slow
def test_whole_steps_sample_with_transformers_where_vllm_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(whole_runs, "missing_modules", lambda names: list(names))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (BENCHMARKS, BENCHMARKS.parent))))
    found = context(tmp_path, requests=8)
    whole_runs.take_steps(found)
    result = found.record.result
    assert result["figures"]["sampler"] == "hf"
    assert [row["step"] for row in result["tables"]["steps"]] == [1, 2, 3, 4, 5]
    assert len(result["checks"]) == 4 and all(check["holds"] for check in result["checks"]), result


# What a check refuses


def broken(record: Record) -> list[str]:
    return [check["claim"] for check in record.result["checks"] if not check["holds"]]


def test_a_cycle_with_stale_weights_or_a_stale_version_is_found(tmp_path):
    recipe = sampling.sampling_recipe(TOY, eager=True)
    first = {"cycle": 1, "versions": [0], "gap_mean_nats": 0.001, "moved_by_update_nats": 0.08}
    good = {"cycle": 2, "versions": [1], "gap_mean_nats": 0.002, "moved_by_update_nats": 0.06}
    record = context(tmp_path).record
    sampling.check_cycle(record, recipe, first, None)
    sampling.check_cycle(record, recipe, good, first)
    assert broken(record) == [] and len(record.result["checks"]) == 5
    sampling.check_cycle(record, recipe, {**good, "gap_mean_nats": 0.08}, first)
    assert broken(record) == ["cycle 2: mean gap under half of what the last update moved"]
    record = context(tmp_path).record
    sampling.check_cycle(record, recipe, {**good, "versions": [0, 1], "gap_mean_nats": 0.2}, None)
    assert broken(record) == [
        "cycle 2: completions are of version 1", "cycle 2: mean gap within 0.1 nats",
    ]  # fmt: skip


def test_a_resumed_run_that_differs_or_lost_a_step_is_found(tmp_path):
    whole = [
        {"step": step, "loss": step / 10, "grad_norm": 1.0, "step_time": 5.0, "x_seconds": 1.0}
        for step in (1, 2, 3, 4)
    ]
    slower = [row | {"step_time": 6.0, "x_seconds": 2.0} for row in whole]
    found = context(tmp_path)
    whole_runs.compare_steps(found, whole, slower)
    assert broken(found.record) == []
    whole_runs.compare_steps(found, whole, [*slower[:3], slower[3] | {"loss": 0.5}])
    assert broken(found.record) == ["the same metrics, bit for bit"]
    found = context(tmp_path)
    whole_runs.compare_steps(found, whole, slower[:3])
    assert broken(found.record)[0] == "the resumed run has every step once"


def test_an_error_while_closing_is_found():
    quiet = "Using None for EOS token id\nINFO closing"
    assert whole_runs.errors_in(quiet) == []
    assert whole_runs.errors_in(f"{quiet}\nRuntimeError: CUDA error: invalid argument") == [
        "RuntimeError: CUDA error: invalid argument"
    ]


# All of it


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", [part.number for part in PARTS])
def test_every_part_ends_well_at_toy_size(number, tmp_path):
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), "--toy", "--part", str(number)]
    done = subprocess.run(
        [*command, "--output", str(tmp_path)],
        capture_output=True, text=True, check=False, env=outside_ranks.environment(),
    )  # fmt: skip
    result = read_results(tmp_path)[0]
    skipped = missing_modules(find_part(number).needs) or number in (15, 18)  # flex, NCCL
    assert result["status"] == ("skipped" if skipped else "ok"), result
    assert result["stdout_lines"] == 0 and done.returncode == 0
    if not skipped:
        assert result["checks"] or number == 12
