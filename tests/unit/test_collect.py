"""What `LLM` and `AsyncLLM` take as prompts and conversations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from octavo.engine import collect
from octavo.errors import RequestError

USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize("make", [torch.tensor, np.array, tuple, list], ids=["tensor", "array", "tuple", "list"])
def test_token_ids_of_every_library(make: Any) -> None:
    assert collect.listed(make([3, 4])) == [[3, 4]]
    assert collect.listed([make([3, 4]), make([5])]) == [[3, 4], [5]]
    assert collect.listed(make([[3, 4], [5, 6]])) == [[3, 4], [5, 6]]
    assert all(type(token) is int for token in collect.listed(make([3, 4]))[0])


@pytest.mark.parametrize("prompt", [torch.tensor(3), torch.tensor([1.5]), torch.tensor([True]), np.array(3)], ids=str)
def test_tensors_that_are_no_token_ids(prompt: Any) -> None:
    with pytest.raises(RequestError, match="prompt: got"):
        collect.listed(prompt)


def test_one_conversation_or_many() -> None:
    assert collect.conversations([USER]) == [[USER]]
    assert collect.conversations((USER, USER)) == [[USER, USER]]
    assert collect.conversations([[USER], (USER, USER)]) == [[USER], [USER, USER]]
    assert collect.conversations([]) == []


@pytest.mark.parametrize("messages", ["hello", None, 5, USER, b"x", ["hello"], [5], [None], [[USER], USER]], ids=repr)
def test_what_is_no_conversation_is_named(messages: Any) -> None:
    with pytest.raises(RequestError, match="messages: got .*list of messages") as caught:
        collect.conversations(messages)
    assert caught.value.param == "messages"
