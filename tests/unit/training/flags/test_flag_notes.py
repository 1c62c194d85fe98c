# SPDX-License-Identifier: Apache-2.0
"""Spellings of other releases, and flags whose whole effect is on other settings."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.core.errors import ConfigError
from megatron.training.config.container import RunConfig
from megatron.training.flags.flag import former_flags, notes_of_idle_flags
from megatron.training.flags.read import examine, read_run_config
from megatron.training.launch.initialize import read_command_line
from tests.support.run_flags import SMALLEST_RUN, run_config

CURRENT = [former for former in former_flags() if former.is_upstream]


@pytest.mark.flags(
    "--use-mcore-models", "--use-flash-attn", "--use-dist-ckpt", "--dist-ckpt-format", "--ckpt-fully-parallel-save",
    "--auto-detect-ckpt-format", "--disable-msc", "--enable-experimental", "--disable-jit-fuser", "--local-rank",
    "--align-param-gather", "--no-align-param-gather", "--gradient-reduce-div-fusion",
    "--no-gradient-reduce-div-fusion", "--create-all-gather-group",
    "--test-mode", "--train-sync-interval", "--tp-comm-bootstrap-backend", "--use-ring-exchange-p2p",
    "--fused-residual-rmsnorm", "--high-priority-a2a-comm-stream", "--moe-enable-deepep",
    "--moe-flex-dispatcher-backend", "--moe-permute-fusion-into-hybridep", "--moe-hybridep-pad-uneven-dispatch-inputs",
    "--moe-pad-experts-for-cuda-graph-inference", "--moe-router-fusion", "--moe-flex-dispatcher-num-sms",
    "--use-grouped-gemm-for-shared-expert", "--use-grouped-gemm-for-dense-mlp", "--moe-use-grouped-tensor",
    "--moe-single-grouped-weight", "--moe-single-grouped-bias", "--moe-paged-stash", "--moe-paged-stash-page-size",
    "--moe-paged-stash-buffer-size-factor-cuda", "--moe-paged-stash-buffer-size-factor-cpu",
    "--export-moe-apply-probs-on-input",
    "--moe-deepep-num-sms", "--moe-hybridep-num-sms", "--moe-hybridep-num-blocks-permute",
    "--moe-hybridep-num-blocks-unpermute", "--moe-hybridep-num-sms-preprocessing", "--moe-ncclep-zero-copy",
    "--inference-cuda-graph-scope", "--config-logger-dir", "--flash-decode", "--use-te-activation-func",
    "--symmetric-ar-type", "--nccl-all-reduce-for-prefill", "--inference-fuse-tp-communication",
    "--inference-disable-triton-nvls-kernels", "--inference-grouped-gemm-backend",
    "--inference-moe-disable-fused-quant-kernels", "--inference-moe-token-dispatcher-type", "--mlp-chunks-for-prefill",
    "--optimizer-cuda-graph", "--delay-offload-until-cuda-graph",
    "--onnx-safe", "--tp-comm-overlap-cfg", "--ckpt-fully-parallel-load-exchange-algo",
    "--ckpt-fully-parallel-load-per-rank-objects", "--ckpt-fully-parallel-save-process-group",
    "--ckpt-fully-parallel-load-process-group", "--ckpt-assume-constant-structure",
    "--distrib-optim-fully-reshardable-mem-efficient", "--verify-integrity",
    "--ckpt-convert-update-legacy-dist-opt-format", "--no-ckpt-fully-parallel-save",
    "--ckpt-load-validate-sharding-integrity", "--no-ckpt-load-validate-sharding-integrity",
    "--disable-ckpt-load-validate-sharding-integrity", "--dist-ckpt-save-pre-mcore-014", "--dist-ckpt-workers",
    "--ckpt-drop-redundant-extra-state", "--ckpt-pg-tensors-cache-path", "--ckpt-pg-tensors-cache-create",
    "--async-strategy", "--async-ckpt-use-cpu-shm",
    "--lazy-mpu-init", "--use-sharp", "--sharp-enabled-group", "--keep-fp8-transpose-cache",
    "--reuse-grad-buf-for-mxfp8-param-ag",
    "--tokenizer-hf-no-use-fast", "--cache-mla-latents", "--mla-down-proj-fusion",
    "--otel-enabled", "--otel-service-name", "--otel-span-groups",
    "--run-workload-inspector-server", "--inference-batch-times-seqlen-threshold", "--max-tokens-to-oom",
    "--use-legacy-static-engine", "--inference-max-requests", "--inference-max-seq-length",
    "--inference-dynamic-batching", "--inference-dynamic-batching-buffer-size-gb",
    "--inference-dynamic-batching-paused-buffer-size-gb", "--inference-dynamic-batching-mamba-memory-ratio",
    "--inference-dynamic-batching-block-size", "--inference-dynamic-batching-max-requests",
    "--inference-dynamic-batching-max-tokens", "--inference-dynamic-batching-num-cuda-graphs",
    "--inference-dynamic-batching-track-paused-request-events",
    "--inference-dynamic-batching-track-generated-token-events", "--decode-only-cuda-graphs",
    "--inference-cuda-graph-all-prefills", "--inference-cuda-graph-max-tokens",
    "--inference-dynamic-batching-unified-memory-level", "--enable-chunked-prefill", "--num-speculative-tokens",
    "--inference-dynamic-batching-prefix-caching", "--no-inference-dynamic-batching-prefix-caching",
    "--inference-dynamic-batching-prefix-caching-eviction-policy",
    "--inference-dynamic-batching-prefix-caching-coordinator-policy",
    "--inference-dynamic-batching-prefix-caching-routing-alpha", "--inference-dynamic-batching-prefix-caching-mamba-gb",
    "--inference-dynamic-batching-cuda-graph-mixed-prefill-count",
    "--inference-dynamic-batching-cuda-graph-sizing-distribution", "--inference-dynamic-batching-sampling-backend",
    "--offset-sampling-seed-by-dp-rank", "--use-same-sampling-seed-across-dp-ranks",
    "--inference-dynamic-batching-async-sched-mode", "--inference-dynamic-batching-logprobs-mode",
    "--inference-logging-step-interval", "--inference-text-gen-server-logging",
    "--no-inference-text-gen-server-logging", "--inference-wandb-logging", "--no-inference-wandb-logging",
    "--inference-coordinator-port", "--inference-use-synchronous-zmq-collectives",
    "--no-inference-use-synchronous-zmq-collectives", "--inference-disable-ep-consensus",
    "--no-inference-disable-ep-consensus", "--inference-shards", "--one-logger", "--no-one-logger",
    "--one-logger-project", "--one-logger-run-name", "--one-logger-async", "--app-tag-run-name",
    "--app-tag-run-version", "--export-te-mcore-model", "--export-default-te-spec", "--export-force-local-attention",
    "--gdp-num-householder", "--gdp-cutedsl-kernel", "--gdp-num-chunk-states-to-recompute",
    "--disable-mamba-mem-eff-path", "--mamba-training-ssm-states-dtype", "--mamba-inference-conv-states-dtype",
    "--mamba-inference-ssm-states-dtype",
)  # fmt: skip
@pytest.mark.parametrize("former", CURRENT, ids=lambda former: former.name)
def test_what_needs_no_switch_is_noted(former: object) -> None:
    """Their whole effect is the note (and the flag they stand for)."""
    name, nargs = former.name, former.nargs  # type: ignore[attr-defined]
    config = run_config(name if nargs == 0 else f"{name} 1")
    assert any(note.startswith(name) for note in config.notes)
    assert not any(note.startswith(name) for note in run_config().notes)


@pytest.mark.parametrize("former", former_flags(), ids=lambda former: former.name)
def test_flags_of_other_releases_are_noted_or_refused(former: object) -> None:
    value = "" if former.nargs == 0 else "adam"  # type: ignore[attr-defined]
    argv = [*SMALLEST_RUN.split(), former.name, *value.split()]  # type: ignore[attr-defined]
    result = examine(argv, {})
    said = [problem.text for problem in result.problems] + list(result.config.notes if result.config else ())
    assert any(former.name in line for line in said) or result.problems  # type: ignore[attr-defined]
    assert not any("unknown flag" in line for line in said)


@pytest.mark.parametrize(("name", "text"), notes_of_idle_flags().items())
def test_switches_that_have_nothing_to_do_are_noted_where_they_are_written(name: str, text: str) -> None:
    assert f"{name} {text}" in examine([*SMALLEST_RUN.split(), name], {}).config.notes
    assert f"{name} {text}" not in examine(SMALLEST_RUN.split(), {}).config.notes


@pytest.mark.flags("--use-flash-attn")
def test_use_flash_attn_selects_the_backend_unless_another_is_named() -> None:
    assert run_config("--use-flash-attn").model.attention_backend == "flash"
    assert run_config("--attention-backend fused --use-flash-attn").model.attention_backend == "fused"


@pytest.mark.flags("--use-rotary-position-embeddings")
def test_use_rotary_position_embeddings() -> None:
    assert run_config("--use-rotary-position-embeddings").model.position_embedding_type == "rope"


@pytest.mark.flags("--position-embedding")
def test_no_position_embedding() -> None:
    assert run_config("--no-position-embedding").model.position_embedding_type == "none"
    assert run_config("--no-position-embedding --position-embedding-type rope").model.position_embedding_type == "rope"
    assert (
        run_config("--no-position-embedding --position-embedding").model.position_embedding_type == "learned_absolute"
    )


@pytest.mark.flags("--transformer-impl")
def test_transformer_engine_is_noted() -> None:
    assert any("plain torch" in note for note in run_config("--transformer-impl transformer_engine").notes)
    assert not any("plain torch" in note for note in run_config("--transformer-impl local").notes)


@pytest.mark.flags("--group-query-attention", "--num-query-groups")
def test_query_groups() -> None:
    assert run_config().model.num_query_groups == 2
    assert run_config("--group-query-attention").model.num_query_groups == 1
    assert run_config("--num-query-groups 1").model.num_query_groups == 1
    assert run_config("--num-query-groups 0").model.num_query_groups == 2


@pytest.mark.parametrize(
    ("flag", "activation", "gated"),
    [
        ("", "gelu", False),
        ("--swiglu", "silu", True),
        ("--quick-geglu", "quick_gelu", True),
        ("--geglu", "gelu", True),
        ("--geglu --openai-gelu", "gelu_tanh", True),
        ("--squared-relu", "squared_relu", False),
        ("--openai-gelu", "gelu_tanh", False),
    ],
)
def test_activation_flags(flag: str, activation: str, gated: bool) -> None:
    model = run_config(f"{flag} --ffn-hidden-size 32").model
    assert (model.activation_func, model.gated_linear_unit) == (activation, gated)


@pytest.mark.parametrize(
    ("flags", "note"),
    [
        ("--hidden-dropout 1.0", "--hidden-dropout 1.0 drops all outputs"),
        ("--attention-dropout 1", "--attention-dropout 1.0 drops every attention weight"),
        ("--init-method-std 0", "--init-method-std 0.0 begins with matrices of zeros"),
        ("--embedding-init-method-std 0", "--embedding-init-method-std 0.0 begins with matrices of zeros"),
        ("--embedding-init-method-std 0 --untie-embeddings-and-output-weights", None),
        ("--hidden-dropout 0.9 --attention-dropout 0 --init-method-std 1e-9 --embedding-init-method-std 0.02", None),
        ("--lr 0", "--lr 0.0 leaves every weight as it is"),
    ],
)
def test_values_with_which_nothing_is_learnt_are_noted(flags: str, note: str | None) -> None:
    # Some of the flags are those of the smallest run again, which is noted, too.
    usual = run_config().notes
    found = [line for line in run_config(flags).notes if line not in usual and "the last one counts" not in line]
    assert [line[: len(note or "")] for line in found] == ([] if note is None else [note])


def test_the_file_form_of_a_config_comes_back_equal() -> None:
    config = run_config("--bf16 --lr-decay-style cosine --rampup-batch-size 2 2 10")
    assert RunConfig.from_dict(config.to_dict()) == config
    assert RunConfig.from_dict(config.to_dict() | {"later": 1}) == config


def test_a_blend_in_one_text_is_divided() -> None:
    base = SMALLEST_RUN.replace("--mock-data ", "").split()
    result = examine([*base, "--data-path", "0.7 a 0.3 b"], {})
    assert result.config is not None
    assert result.config.data.data_path == ["0.7", "a", "0.3", "b"]


def test_a_repeated_flag_is_noted() -> None:
    """With what was written, in its order; the last one counts, as in argparse."""
    config = run_config("--lr 0.1 --lr 0.2 --no-bias-swiglu-fusion --bias-swiglu-fusion --bf16 --bf16")
    assert config.optimizer.lr == 0.2 and config.gpt.bias_swiglu_fusion
    repeated = [note for note in config.notes if "the last one counts" in note]
    assert repeated == [
        "--lr 0.01, then --lr 0.1, then --lr 0.2: the last one counts",
        "--no-bias-swiglu-fusion, then --bias-swiglu-fusion: the last one counts",
    ]


def test_flags_of_a_script_may_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that it declares itself, and those for which it only has another default."""

    def add_flags(parser: Any) -> None:
        parser.add_argument("--tag", action="append")

    monkeypatch.setattr("sys.argv", ["script", *SMALLEST_RUN.split(), "--tag", "a", "--tag", "b"])
    config = read_command_line(add_flags, {"lr": 5, "tokenizer_type": "GPT2BPETokenizer", "seed": 7})
    assert config.extra == {"tag": ["a", "b"]}
    assert (config.optimizer.lr, config.tokenizer.tokenizer_type, config.model.seed) == (0.01, "NullTokenizer", 7)
    assert not [note for note in config.notes if "the last one counts" in note]


@pytest.mark.parametrize("split", ["-1,1,1", "0,0,0", "nan,1,1", "1,1,1,1", "x", ""])
def test_a_bad_split_needs_no_data_to_be_seen(split: str) -> None:
    for source in (["--mock-data"], ["--data-path", "nowhere"]):
        argv = [word for word in SMALLEST_RUN.split() if word != "--mock-data"]
        with pytest.raises(ConfigError, match="--split is"):
            read_run_config([*argv, *source, "--split", split, "--print-config"], {})


def test_bad_weights_of_a_blend_need_no_data_to_be_seen() -> None:
    argv = SMALLEST_RUN.replace("--mock-data ", "").split()
    with pytest.raises(ConfigError, match="--data-path: the weight of b is -1") as found:
        read_run_config([*argv, "--data-path", "1", "a", "-1", "b", "--split", "0,0"], {})
    assert len(found.value.problems) == 2


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", "no flag names data: pretrain_gpt.py will need --data-path"),
        ("", "no flag names a tokenizer: pretrain_gpt.py will need one"),
        ("--tokenizer-type NullTokenizer", "will need --vocab-size for --tokenizer-type NullTokenizer"),
        ("--vocab-file v.json", "no flag names a tokenizer"),
        ("--tokenizer-type GPT2BPETokenizer --vocab-file v.json", "will need --merge-file for --tokenizer-type GPT2"),
        ("--tokenizer-type TikTokenizer", "will need --tokenizer-model for --tokenizer-type TikTokenizer"),
        ("--vocab-file v.json --merge-file m.txt", None),
        ("--tokenizer-metadata metadata.json", None),
        ("--tokenizer-type NullTokenizer --vocab-size 8", None),
    ],
)
def test_what_a_run_will_need_of_data_and_tokenizer(flags: str, expected: str | None) -> None:
    """--print-config works without either, and says so."""
    model = SMALLEST_RUN.partition(" --mock-data")[0]
    notes = run_config(flags, base=model).notes
    if expected is None:
        assert not any("tokenizer" in note for note in notes)
    else:
        assert any(expected in note for note in notes), notes
