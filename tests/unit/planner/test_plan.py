# SPDX-License-Identifier: Apache-2.0
"""`python -m megatron plan`: legal layouts only, one model of memory, times that follow the layout, and sentences."""

from __future__ import annotations

import dataclasses
import json
import random
import shlex
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.planned_runs import RECOMMENDED, RUNS, judge_recommended, judge_scaled
from megatron.cli import plan, plan_search, probe
from megatron.cli.plan_search import Judge, Layout
from megatron.planner.devices import DEVICES, Device, find_device
from megatron.planner.links import Link
from megatron.planner.step_memory import predict_step_memory
from megatron.planner.step_time import shorten
from megatron.training.flags.read import examine
from megatron.training.recipes.gpt import describe_gpt_workload

MODEL = """--num-layers 6 --hidden-size 768 --num-attention-heads 12 --max-position-embeddings 512 --seq-length 512
    --vocab-size 1009 --global-batch-size 48"""
RUN = f"{MODEL} --mock-data --tokenizer-type NullTokenizer --lr 1e-4 --train-iters 1 --bf16"


def run(monkeypatch: pytest.MonkeyPatch, text: str) -> int:
    monkeypatch.setattr(sys, "argv", ["plan", *shlex.split(text)])
    return plan.main()


def find_layouts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, code: int = 0) -> dict[str, Any]:
    assert run(monkeypatch, f"--json {tmp_path / 'plan.json'} {text}") == code
    found: dict[str, Any] = json.loads((tmp_path / "plan.json").read_text())
    return found


@pytest.mark.parametrize("more", ["", "--num-experts 6 --moe-router-topk 2 --moe-ffn-hidden-size 512"])
def test_what_is_proposed_is_legal_and_what_is_rejected_has_a_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, more: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = find_layouts(monkeypatch, tmp_path, f"--gpus 12 --gpu h100 --gpus-per-node 4 {MODEL} {more}")
    assert len(found["layouts"]) == 5
    for layout in found["layouts"]:
        examined = examine(layout["flags"], {"WORLD_SIZE": "12"})
        assert examined.problems == ()
        assert layout["tp"] * layout["pp"] * layout["cp"] * layout["dp"] == 12
        assert layout["fits"] and layout["step_bytes"] < layout["memory_bytes"] <= find_device("h100").memory_bytes
        assert layout["tokens_per_second"] == pytest.approx(48 * 512 / layout["step_seconds"])
        assert sum(layout["parts"].values()) == pytest.approx(layout["step_seconds"])
        # The same numbers as the memory report, which walks the whole schedule.
        config = examined.config
        stages = predict_step_memory(
            config.model, config.ddp, config.optimizer, describe_gpt_workload(config, config_rows(config))
        )
        assert layout["step_bytes"] == pytest.approx(max(stage.total for stage in stages))
    seconds = [layout["step_seconds"] for layout in found["layouts"]]
    assert seconds == sorted(seconds)
    assert found["rejected"] and all(layout["why"] for layout in found["rejected"])
    assert any(not layout["legal"] for layout in found["rejected"])
    if more:
        assert {1, 2} <= {layout["ep"] for layout in found["layouts"] + found["rejected"]}
    assert "the fastest: " in capsys.readouterr().out


def config_rows(config: Any) -> int:
    from megatron.training.recipes.vocabulary import build_tokenizer, compute_padded_vocab_size

    return compute_padded_vocab_size(config, build_tokenizer(config))


def test_flags_that_are_given_stay(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = f"--gpus 8 --gpu h100 {RUN} --tensor-model-parallel-size 2 --micro-batch-size 2 --optimizer sgd"
    found = find_layouts(monkeypatch, tmp_path, text)
    for layout in found["layouts"] + found["rejected"]:
        assert (layout["tp"], layout["flags"].count("--micro-batch-size")) == (2, 1)
        assert "--use-distributed-optimizer" not in layout["flags"]


def test_a_model_that_fits_nowhere_says_where_it_would(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = tmp_path / "gpu.json"
    small.write_text(json.dumps({"like": "a100", "memory_bytes": 1.2e9, "reserved_bytes": 0, "communicator_bytes": 0}))
    text = f"--gpus 2 --gpu-file {small} {RUN} --num-layers 24 --micro-batch-size 1"
    found = find_layouts(monkeypatch, tmp_path, text, code=1)
    assert found["layouts"] == [] and "too much" in found["rejected"][0]["why"]
    said = capsys.readouterr().out
    assert "no layout fits 2 x a100" in said and "it would fit " in said
    gpus = int(said.split("it would fit ")[1].split()[0])
    flags = said.split("it would fit ")[1].split(": ", 1)[1].split("\n")[0]
    assert gpus > 2 and Judge(gpus, plan.read_device(small)).judge(flags.split()).fits
    monkeypatch.setattr(plan_search, "LARGEST_JOB", 2)
    find_layouts(monkeypatch, tmp_path, text, code=1)
    assert "nor would it fit more of them" in capsys.readouterr().out


def test_one_layout_is_explained_and_an_illegal_one_has_its_arithmetic(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 3 --micro-batch-size 1"
    found = find_layouts(monkeypatch, tmp_path, f"--explain --gpus 12 --gpu h100 --dp 2 -- {RUN} {sizes}")
    assert found["legal"] and found["dp"] == 2 and found["why"] is None
    found = find_layouts(monkeypatch, tmp_path, f"--explain --gpus 10 --gpu h100 -- {RUN} {sizes}", code=2)
    assert not found["legal"] and "= 6 processes" in found["why"] and "10 processes" in found["why"]
    assert (found["tp"], found["pp"], found["dp"]) == (2, 3, 1)
    assert run(monkeypatch, f"--explain --gpus 12 --gpu h100 --dp 4 -- {RUN} {sizes}") == 2
    assert "TP 2 x PP 3 x CP 1 x DP 4 = 24 GPUs, and --gpus says 12" in capsys.readouterr().err


def test_launchers_start_the_planned_layout(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import subprocess

    import yaml

    for kind in ("slurm", "torchrun", "k8s"):
        text = (
            f"--gpus 16 --gpu a100 {MODEL} --script {kind} --output {tmp_path / kind} --pipeline-model-parallel-size 2"
        )
        assert run(monkeypatch, text) == 0
        script = (tmp_path / kind).read_text()
        # Data and learning rate are the run's, not the plan's.
        assert "--nnodes 2 --nproc_per_node 8" in script and "--mock-data" not in script and "--lr " not in script
        assert "--pipeline-model-parallel-size 2" in script and "--hidden-size 768" in script
        if kind == "k8s":
            service, job = yaml.safe_load_all(script)
            assert (service["kind"], job["spec"]["completions"]) == ("Service", 2)
        else:
            assert subprocess.run(["bash", "-n", tmp_path / kind]).returncode == 0
    assert run(monkeypatch, f"--gpus 12 --gpu a100 {MODEL} --script slurm") == 2
    assert "12 processes do not fill nodes of 8" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("--gpus 8 --gpu h10 --num-layers 2", "--gpu h10 is not known; did you mean h100?"),
        ("--gpus 0 --gpu h100", "--gpus 0 cannot be"),
        ("--gpus 8", "the device is not clear"),
        ("--gpus 8 --gpu h100 --train-tokens nan", "--train-tokens nan cannot be"),
        ("--gpus 8 --gpu h100 --output x", "--output is the file of --script"),
        ("--gpus 8 --gpu-file FILE", "holds a list"),
        ("--gpus 7 --gpu h100 --preset llama3-8b --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 "
         "--context-parallel-size 1 --expert-model-parallel-size 1", "does not divide the 7 processes"),
        ("--gpus 8 --gpu h100 --dp 3 --preset llama3-8b", "--gpus 8 cannot be divided with --dp 3"),
        ("--gpus 7 --gpu h100 --preset llama3-8b --tensor-model-parallel-size 2",
         "--gpus 7 cannot be divided with --tensor-model-parallel-size 2"),
        ("--explain --gpus 8 --gpu h100 -- --preset llama3-8b --tensor-model-parallel-size 3",
         "--num-query-groups 8 must be a multiple"),
        ("--gpus 8 --gpu h100 --preset llama3-8x", "--preset llama3-8x is not known"),
        ("--gpus 8 --gpu h100 --hf-config NOWHERE", "does not exist"),
    ],
)  # fmt: skip
def test_bad_input_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, sentence: str
) -> None:
    (tmp_path / "list.json").write_text("[1]")
    assert run(monkeypatch, text.replace("FILE", str(tmp_path / "list.json"))) == 2
    lines = capsys.readouterr().err.splitlines()
    assert any(sentence in line for line in lines if line.startswith("error: ")), lines


@pytest.mark.parametrize(
    "change", [{"memory_bytes": -1}, {"link_bandwidth": "fast"}, {"colour": 1}, {"peak_flops": None}, {"like": "h1000"}]
)
def test_a_row_that_cannot_be_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    row = dataclasses.asdict(find_device("h100")) | change
    if change.get("peak_flops", 1) is None:
        del row["peak_flops"]
    (tmp_path / "gpu.json").write_text(json.dumps(row))
    with pytest.raises(plan.ConfigError, match=next(iter(change))):
        plan.read_device(tmp_path / "gpu.json")


def test_hugging_face_directories_are_planned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fields = {
        "model_type": "llama", "hidden_size": 768, "intermediate_size": 1536, "num_hidden_layers": 4,
        "num_attention_heads": 12, "num_key_value_heads": 3, "vocab_size": 1009, "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(fields))
    found = find_layouts(monkeypatch, tmp_path, f"--gpus 4 --gpu v100 --hf-config {tmp_path} --global-batch-size 16")
    assert "--fp16" in found["layouts"][0]["flags"] and "--num-query-groups" in " ".join(found["layouts"][0]["flags"])


# ---- the model


def judge(flags: str, gpus: int = 16, device: Device | None = None) -> Layout:
    layout = Judge(gpus, device or find_device("h100")).judge(f"{RUN} --micro-batch-size 1 {flags}".split())
    assert layout.legal, layout.why
    return layout


def test_time_follows_what_a_layout_does() -> None:
    plain = judge("")
    assert {"products", "attention", "elementwise", "output layer", "data parallel", "optimizer"} <= plain.parts.keys()
    again = judge("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1")
    # Forward is a third of products, less of the rest; backward's products add to the gradients, too.
    once = sum(plain.parts[part] for part in ("products", "attention", "elementwise"))
    assert 0.22 < again.parts["recomputed"] / once < 0.36
    divided = judge("--tensor-model-parallel-size 2 --sequence-parallel")
    assert divided.parts["tensor parallel"] > 0
    hidden = judge("--tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap")
    assert hidden.parts["tensor parallel"] < divided.parts["tensor parallel"]
    bubbles = [
        judge(f"--pipeline-model-parallel-size 3 {more}", gpus=3).parts["bubble"]
        for more in ("", "--num-virtual-stages-per-pipeline-rank 2", "--pipeline-schedule zb-h1")
    ]
    assert bubbles[0] > max(bubbles[1:]) >= min(bubbles[1:]) > 0
    slow = dataclasses.replace(find_device("h100"), network_bandwidth=1e9)
    assert judge("", device=slow).parts["data parallel"] > 2 * plain.parts["data parallel"]
    experts = "--num-experts 4 --moe-router-topk 2 --expert-model-parallel-size 4 --moe-token-dispatcher-type alltoall"
    assert judge(experts).parts["expert parallel"] > 0
    assert judge("--context-parallel-size 2").parts["context parallel"] > 0


def test_outer_state_of_sites_is_planned() -> None:
    """As the optimizer's, by which the weights are divided; a site is a job, or a block of one."""
    divided = "--use-distributed-optimizer --untie-embeddings-and-output-weights"
    alone, sites = judge(divided, gpus=4), "--diloco-replicas 2 --diloco-exchange-dtype int8"
    job = judge(f"{divided} {sites} --datacenter-id 0 --diloco-address a:1 --diloco-key-file k", gpus=4)
    block = judge(f"{divided} {sites}", gpus=8)
    assert job.dp == 4 and block.dp == 8 and job.step_bytes == block.step_bytes
    config = examine(f"{RUN} {divided}".split(), {"WORLD_SIZE": "4"}).config
    workload = describe_gpt_workload(config, 1024)
    parameters = predict_step_memory(config.model, config.ddp, config.optimizer, workload)[0].parameters
    assert job.step_bytes - alone.step_bytes == pytest.approx(3 * 4 * parameters / 4, rel=1e-6)
    assert block.tokens_per_second == 2 * job.tokens_per_second


def test_a_shortened_schedule_has_the_same_bubble_and_memory() -> None:
    """Random layouts: walking fewer microbatches changes nothing that is predicted."""
    chooser = random.Random(5)
    for _ in range(6):
        stages, chunks = chooser.choice([2, 3, 6]), chooser.choice([1, 1, 2])
        count = stages * chooser.randrange(9, 16)
        flags = f"--pipeline-model-parallel-size {stages} --num-layers 12 --global-batch-size {count}"
        flags += f" --num-virtual-stages-per-pipeline-rank {chunks}" if chunks > 1 else ""
        found = judge(flags, gpus=stages)
        config = examine(f"{RUN} --micro-batch-size 1 {flags}".split(), {"WORLD_SIZE": str(stages)}).config
        assert shorten(config.model, count) < count
        whole = predict_step_memory(config.model, config.ddp, config.optimizer, describe_gpt_workload(config, 1024))
        assert found.step_bytes == pytest.approx(max(stage.total for stage in whole))


def test_links_follow_the_alpha_beta_model() -> None:
    row = dataclasses.replace(
        find_device("h100"), link_bandwidth=100.0, network_bandwidth=10.0, link_seconds=1.0, network_seconds=2.0,
        devices_per_node=4,
    )  # fmt: skip
    assert Link(row, 1).gather(800) == Link(row, 1).exchange(800) == 0
    assert Link(row, 4).gather(800) == pytest.approx(3 * 1.0 + 800 * 3 / 4 / 100)
    assert Link(row, 4).reduce(800) == 2 * Link(row, 4).gather(800)
    # Two nodes: each rank's quarter goes over the network, half of it from the other node.
    assert Link(row, 8).gather(800) == pytest.approx(3 * 1.0 + 2.0 + max(800 * 3 / 4 / 100, 200 / 2 / 10))
    # One rank a node.
    assert Link(row, 2, stride=4).send(100) == pytest.approx(2.0 + 100 / 10)
    assert Link(row, 8).exchange(800) == pytest.approx(3 * 1.0 + 2.0 + 400 / 10)


def test_published_runs_are_predicted() -> None:
    errors = {}
    for published in RUNS:
        predicted, measured = published.predict()
        errors[published.name, published.gpus] = abs(predicted / measured - 1)
    assert statistics.median(errors.values()) < 0.15
    # docs/planning.md says why this one is.
    assert [name for (name, _), error in errors.items() if error > 0.25] == ["DeepSeek-V3"]


def test_the_layouts_of_guides_are_judged() -> None:
    found = [judge_recommended(*row[1:]) for row in RECOMMENDED]
    assert [number for number, (layout, _) in enumerate(found, 1) if not layout.fits] == [4, 7, 9, 13]
    assert [number for number, (_, gpus) in enumerate(found, 1) if gpus != RECOMMENDED[number - 1][1]] == [13]
    # 70B on 64 GPUs: less tensor parallelism wins.
    assert found[11][0].step_seconds < found[1][0].step_seconds  # type: ignore[operator]


def test_scaling_is_near_linear_as_long_as_the_batch_grows() -> None:
    start, grown, fixed = (judge_scaled(*sizes).mfu for sizes in ((64, 128), (1024, 2048), (1024, 128)))
    assert start and grown and 0.97 * start < grown <= start
    # A batch of 128 has only two rows for each replica there.
    assert fixed and fixed < 0.7 * start
    assert (judge_scaled(1024, 1024).mfu or 1.0) < 0.9 * (judge_scaled(64, 1024).mfu or 0.0)


def test_rows_of_devices_can_be() -> None:
    assert {"v100", "a100", "h100", "h200", "b200", "gb200"} <= DEVICES.keys()
    for row in DEVICES.values():
        assert row.network_bandwidth < row.link_bandwidth < row.memory_bandwidth < row.peak_flops


# ---- probe


def test_a_measured_row_is_taken_by_a_plan(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    row = tmp_path / "machine.json"
    monkeypatch.setattr(probe, "_ATTEMPTS", 1)
    monkeypatch.setattr(sys, "argv", ["probe", "--world-size", "2", "--output", str(row)])
    assert probe.main() == 0
    found = json.loads(row.read_text())
    assert {"peak_flops", "memory_bandwidth", "link_bandwidth", "link_seconds"} <= set(found["measured"])
    assert found["hidden_share"] == 0.0 and isinstance(found["unsteady"], list)
    flags = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --max-position-embeddings 64 --seq-length 64"
    layouts = find_layouts(
        monkeypatch, tmp_path, f"--gpus 2 --gpu-file {row} {flags} --vocab-size 100 --global-batch-size 4"
    )["layouts"]
    assert layouts
    monkeypatch.setattr(sys, "argv", ["probe", "--world-size", "0", "--output", str(row)])
    assert probe.main() == 2


def test_a_probe_measures_again_until_two_rounds_agree(capsys: pytest.CaptureFixture[str]) -> None:
    seconds = {"square": 0.02, "rows": 0.004, "columns": 0.003, "copy": 0.003, "elementwise": 0.004,
               "attention": 0.01, "launch": 1e-6}  # fmt: skip
    busy = {name: [5 * time, 9 * time] for name, time in seconds.items()}
    idle = {name: [time, 1.05 * time, 3 * time] for name, time in seconds.items()}

    def measure(attempts: list[Any]) -> dict[str, Any]:
        return probe.measure(1, lambda world_size: (1e11, attempts.pop(0)))

    found = measure([busy, idle])
    assert found == measure([idle]) and found["unsteady"] == []
    assert "rounds differ (square, rows, columns" in capsys.readouterr().err
    # One fast round is not believed, and says so.
    assert measure([idle | {"copy": [0.001, 0.003]}, idle, busy])["unsteady"] == ["copy"]


def test_a_row_gives_back_the_rates_that_were_measured() -> None:
    half_rows, half_width, best, side = 70.0, 30.0, 2e11, probe.ON_HOST.side

    def multiply(rows: int, columns: int) -> float:
        rate = best * rows / (rows + half_rows) * columns / (columns + half_width)
        return 2 * rows * columns * side / rate

    seconds = {
        "square": multiply(side, side), "rows": multiply(128, side), "columns": multiply(side, 128), "copy": 1e-3,
        "elementwise": 1e-3, "attention": 1e-2, "launch": 1e-6, "step": 1e-4, "gather": 1e-3, "scatter": 3e-3,
        "reduce": 2.5e-3,
    }  # fmt: skip
    row = probe.derive(1.5e11, seconds, probe.ON_HOST, 2)
    assert row["half_rows"] == pytest.approx(half_rows) and row["half_width"] == pytest.approx(half_width)
    assert row["peak_flops"] * row["product_share"] == pytest.approx(best)
    device = Device("cpu", 1e10, network_bandwidth=1.0, hidden_share=0.0, **row)
    link = Link(device, 2)
    whole = probe.ON_HOST.gathered_bytes
    for run, seconds_of in (("gather", link.gather), ("scatter", link.scatter), ("reduce", link.reduce)):
        assert seconds_of(whole) == pytest.approx(seconds[run], rel=1e-3)


def test_nothing_hides_where_one_processor_computes_and_sends() -> None:
    row = dataclasses.replace(find_device("h100"), hidden_share=0.0)
    for flags, part in (
        ("--overlap-grad-reduce --use-distributed-optimizer --overlap-param-gather", "data parallel"),
        ("--tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap", "tensor parallel"),
        ("--context-parallel-size 2", "context parallel"),
    ):
        assert judge(flags, device=row).parts[part] > 1.01 * judge(flags).parts[part], part
