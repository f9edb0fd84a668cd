"""Bad requests name field, value and what is allowed; good ones are normalised once."""

from __future__ import annotations

import math
import pickle

import msgspec
import pytest

from octavo.errors import RequestError
from octavo.params import SamplingParams

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1), ("temperature", NAN), ("temperature", INF), ("temperature", "hot"),
        ("temperature", None), ("temperature", True), ("temperature", 1e300), ("temperature", 10**400),
        ("top_p", 0), ("top_p", 1.1), ("top_p", -1), ("top_p", NAN), ("top_p", 1e-60),
        ("top_k", -2), ("top_k", 1.5), ("top_k", "5"), ("top_k", True), ("top_k", None),
        ("min_p", -0.1), ("min_p", 1.01), ("min_p", NAN),
        ("presence_penalty", 2.1), ("frequency_penalty", -2.1), ("frequency_penalty", NAN),
        ("repetition_penalty", 0), ("repetition_penalty", -1), ("repetition_penalty", INF),
        ("n", 0), ("n", -1), ("n", 129), ("n", 1.0), ("n", None),
        ("seed", 2**63), ("seed", 1.5), ("seed", "x"),
        ("stop", ""), ("stop", ["a", ""]), ("stop", [1]), ("stop", 5), ("stop", {"a": 1}),
        ("stop_token_ids", [-1]), ("stop_token_ids", "12"), ("stop_token_ids", [1.5]), ("stop_token_ids", 3),
        ("max_tokens", -1), ("max_tokens", 1.5), ("max_tokens", "9"), ("max_tokens", True),
        ("min_tokens", -1), ("min_tokens", None),
        ("logprobs", -1), ("logprobs", 21), ("logprobs", True),
        ("logit_bias", {1: 101}), ("logit_bias", {"x": 1}), ("logit_bias", {-1: 1}), ("logit_bias", [1]),
        ("logit_bias", {1: NAN}), ("logit_bias", {1: "2"}), ("logit_bias", {"²": 1}), ("logit_bias", {1.5: 1}),
        ("logit_bias", {i: 1 for i in range(1025)}),
        ("ignore_eos", 1), ("skip_special_tokens", "yes"), ("include_stop_str_in_output", None), ("json_object", 1),
        ("regex", ""), ("regex", 5), ("grammar", ""), ("json_schema", 5), ("json_schema", False),
    ],
)  # fmt: skip
def test_bad_values_are_named(field: str, value: object) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{field: value})
    message = str(caught.value)
    assert caught.value.param == field and message.startswith(f"{field}: got ") and "allowed" in message or (
        field in message and len(message) > len(field) + 10
    )
    assert len(message) < 300


def test_fields_that_contradict_each_other() -> None:
    with pytest.raises(RequestError, match="min_tokens: got 5; at most max_tokens \\(4\\)"):
        SamplingParams(min_tokens=5, max_tokens=4)
    with pytest.raises(RequestError, match="exclude each other"):
        SamplingParams(regex="a", json_object=True)


def test_floats_are_float32() -> None:
    """A router sends 0.800000011920929 where a user wrote 0.8: the same request."""
    assert SamplingParams(temperature=0.8) == SamplingParams(temperature=0.800000011920929)
    assert SamplingParams(temperature=0.8).temperature == 0.800000011920929
    assert SamplingParams(top_p=0.9, min_p=0.1).top_p == 0.8999999761581421
    assert SamplingParams(logit_bias={1: 0.1}).logit_bias == {1: 0.10000000149011612}
    assert SamplingParams(temperature=1e-60).greedy


def test_what_is_normalised() -> None:
    params = SamplingParams(stop="a", stop_token_ids=[3, 3, 4], logit_bias={"12": 1, 7: 2}, temperature=1)
    assert (params.stop, params.stop_token_ids, params.logit_bias) == (("a",), (3, 4), {12: 1.0, 7: 2.0})
    assert SamplingParams(stop=["a", "b", "a"]).stop == ("a", "b") and SamplingParams().stop == ()
    assert isinstance(params.temperature, float)


def test_edges_that_are_allowed() -> None:
    SamplingParams(max_tokens=0, top_k=0, temperature=0, min_p=1, top_p=1, n=128, seed=-(2**63), logprobs=20)
    SamplingParams(max_tokens=10**15, min_tokens=0, top_k=10**9, json_schema=True, logit_bias={})
    assert SamplingParams(top_k=0).top_k_of(50) == SamplingParams(top_k=-1).top_k_of(50) == 50
    assert SamplingParams(top_k=99).top_k_of(50) == 50


def test_ids_are_checked_against_the_vocabulary() -> None:
    SamplingParams(logit_bias={49: 1}, stop_token_ids=[49]).check(50)
    for field, value in (("logit_bias", {50: 1}), ("stop_token_ids", [50])):
        with pytest.raises(RequestError, match=f"{field}: got 50; the model's token ids are 0 to 49") as caught:
            SamplingParams(**{field: value}).check(50)
        assert caught.value.param == field


def test_params_are_frozen_and_cross_a_process_border() -> None:
    params = SamplingParams(stop=["a"], logit_bias={3: 1.5}, json_schema={"type": "object"}, seed=5, n=2)
    with pytest.raises(AttributeError):
        params.n = 3  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(params)) == params
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
    assert params.with_changes(n=1).n == 1
    with pytest.raises(RequestError):
        params.with_changes(n=0)
