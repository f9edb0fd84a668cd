"""The option table: parsing, precedence, messages. Flags, environment and keywords must agree."""

from __future__ import annotations

import dataclasses

import pytest

from octavo.config import EngineConfig, ServerConfig
from octavo.errors import ConfigError
from octavo.options import format_size, parse_size


def test_flag_beats_environment_beats_default() -> None:
    environ = {"OCTAVO_PAGE_SIZE": "64", "OCTAVO_MAX_RUNNING": "3"}
    config = EngineConfig.from_options({"page_size": "256"}, environ=environ)
    assert (config.page_size, config.max_running, config.seed) == (256, 3, 0)


def test_empty_environment_value_is_as_good_as_none() -> None:
    assert EngineConfig.from_options({}, environ={"OCTAVO_PAGE_SIZE": ""}).page_size == 16


@pytest.mark.parametrize("page_size", [1, 2, 16, 64, 256, 1024, "64"])
def test_page_sizes(page_size: object) -> None:
    assert EngineConfig(page_size=page_size).page_size == int(page_size)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("page_size", 0, "a power of two from 1 to 1024"),
        ("page_size", 3, "a power of two from 1 to 1024"),
        ("page_size", 16.5, "a power of two"),
        ("page_size", True, "a power of two"),
        ("kv_memory", "lots", "512MiB"),
        ("kv_memory", "-1", "512MiB"),
        ("kv_memory", 0, "at least 1 bytes"),
        ("num_pages", 0, "from 1"),
        ("dtype", "float8", "auto, float32, bfloat16"),
        ("quantization", "q4", "auto, none, int8, int4"),
        ("draft", "eagle", "auto, none, ngram, table, eagle3, dflash, ngram+table, ngram+eagle3"),
        ("draft", "no:", "module:Class"),
        ("draft_tokens", 0, "from 1 to 64"),
        ("draft_topk", 0, "from 1 to 64"),
        ("draft_steps", 64, "from 1 to 63"),
        ("max_running", 0, "from 1"),
        ("threads", "0", "from 1"),
        ("seed", -1, "from 0"),
        ("overlap", "maybe", "true"),
        ("model", "", "a model name"),
        ("model", None, "a model name"),
        ("prefill_chunk", 1024, "at most max_batched_tokens (512)"),
    ],
)
def test_bad_values_name_option_value_and_what_is_allowed(name: str, value: object, allowed: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**{name: value})
    assert caught.value.option == name
    assert caught.value.exit_code == 2
    assert repr(value) in str(caught.value)
    assert allowed in str(caught.value)


def test_errors_name_where_the_value_came_from() -> None:
    with pytest.raises(ConfigError, match=r"^--page-size: got '3'"):
        EngineConfig.from_options({"page_size": "3"}, environ={}, cli=True)
    with pytest.raises(ConfigError, match=r"^OCTAVO_PAGE_SIZE: got '3'"):
        EngineConfig.from_options({}, environ={"OCTAVO_PAGE_SIZE": "3"}, cli=True)


def test_an_unknown_option_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="did you mean 'page_size'"):
        EngineConfig.from_options({"pagesize": 16}, environ={})
    with pytest.raises(ConfigError, match="no such option"):
        EngineConfig().replace(tensor_parallel_size=2)


def test_configurations_are_frozen_and_hide_secrets() -> None:
    config = ServerConfig(api_key="hunter2")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.page_size = 64  # type: ignore[misc]
    assert "hunter2" not in repr(config)


def test_every_option_has_a_flag_an_environment_name_and_help() -> None:
    options = ServerConfig.options()
    flags = [o.flag for o in options.values()]
    assert len(set(flags)) == len(flags)
    assert len({o.env for o in options.values()}) == len(flags)
    assert all(o.help and o.allowed for o in options.values())
    assert options["shutdown_timeout_s"].flag == "--shutdown-timeout"
    assert options["draft_adaptive"].env == "OCTAVO_DRAFT_ADAPTIVE"


def test_defaults_pass_their_own_parsers_as_text() -> None:
    """What the documentation shows as a default can be typed on the command line."""
    for opt in ServerConfig.options().values():
        if opt.default is not None and opt.default != () and opt.default != "":
            assert opt.convert(str(opt.default), opt.flag) == opt.default


def test_a_certificate_wants_its_key() -> None:
    with pytest.raises(ConfigError, match="ssl_keyfile"):
        ServerConfig(ssl_certfile="cert.pem")


@pytest.mark.parametrize(
    ("value", "size_bytes"),
    [(5, 5), ("5", 5), ("2GiB", 2 << 30), ("2g", 2 << 30), ("1.5 MiB", 3 << 19), ("1kb", 1000), ("3 TB", 3 * 10**12)],
)
def test_sizes(value: object, size_bytes: int) -> None:
    assert parse_size(value) == size_bytes


def test_sizes_are_readable() -> None:
    assert [format_size(n) for n in (0, 1023, 1536, 96 << 20, 3 << 40)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "96.0 MiB",
        "3.0 TiB",
    ]


def test_device_decides_what_is_left_open() -> None:
    cpu, cuda = EngineConfig(), EngineConfig(device="cuda")
    assert (cpu.overlap_on, cpu.deterministic_on, cpu.compute_dtype) == (False, True, "float32")
    assert (cuda.overlap_on, cuda.deterministic_on, cuda.compute_dtype) == (True, False, "bfloat16")
    assert EngineConfig(overlap=True).overlap_on
