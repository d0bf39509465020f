"""Items as clients give them, and what the thinker is told of them."""

from __future__ import annotations

import base64
import struct
from typing import Any

import pytest

from duplexd.messages import PastTurn
from duplexd.webrtc.realtime.faults import Fault
from duplexd.webrtc.realtime.items import Conversation, Item, check_image, parse_item, turns_of


def png(width: int, height: int) -> bytes:
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sII", 13, b"IHDR", width, height) + bytes(9)


def jpeg(width: int, height: int) -> bytes:
    return b"\xff\xd8\xff\xe0\x00\x04ab" + b"\xff\xc0\x00\x11\x08" + struct.pack(">HH", height, width) + bytes(12)


def uri(data: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


@pytest.mark.parametrize(
    ("url", "code"),
    [
        (uri(png(0, 0)), "image_too_large"),
        (uri(jpeg(10_000, 10_000), "jpeg"), "image_too_large"),
        (uri(b"<svg xmlns='http://www.w3.org/2000/svg'/>", "svg+xml"), "invalid_image"),
        (uri(b"GIF89a" + png(4, 4)), "invalid_image"),
        (uri(b"\xff\xd8" + b"\xff\xe0\x00\x00" * 100, "jpeg"), "invalid_image"),
        ("https://elsewhere.example/x.png", "invalid_value"),
        ("data:image/png;base64,***", "invalid_image"),
        ("data:image/png;base64," + "A" * 12_000_000, "image_too_large"),
    ],
    ids=["0x0", "100 MP", "svg", "polyglot", "endless markers", "a link", "no base64", "12 MB"],
)
def test_pictures_are_judged_by_their_header(url: str, code: str) -> None:
    """T-BAD-07: by size and kind, before a pixel is decoded; a link is never followed."""
    with pytest.raises(Fault) as caught:
        check_image(url, "image_url")

    assert (caught.value.code, caught.value.param) == (code, "image_url")


@pytest.mark.parametrize("data", [png(640, 480), jpeg(640, 480)], ids=["png", "jpeg"])
def test_a_picture_that_is_one_passes(data: bytes) -> None:
    assert check_image(uri(data), "x") == (640, 480)


@pytest.mark.parametrize("takes", [("text", "audio"), ("text", "audio", "image")])
def test_a_picture_is_refused_whatever_the_model_takes(takes: tuple[str, ...]) -> None:
    """No thinker is told one: of a model that named images it was taken, and forgotten without a word."""
    part = {"type": "input_image", "image_url": uri(png(4, 4))}
    with pytest.raises(Fault, match=r"does not read images; it takes audio, text\."):
        parse_item({"type": "message", "role": "user", "content": [part]}, "item", new_id="i", takes=takes)


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({}, "item.type"),
        ({"type": "message"}, "item.role"),
        ({"type": "message", "role": "nobody", "content": []}, "item.role"),
        (
            {"type": "message", "role": "user", "content": [{"type": "output_text", "text": "x"}]},
            "item.content[0].type",
        ),
        ({"type": "message", "role": "user", "content": [{"type": "input_text"}]}, "item.content[0].text"),
        ({"type": "function_call_output", "output": "x"}, "item.call_id"),
        ({"type": "mcp_call"}, "item.type"),
        ({"type": "message", "role": "user", "content": [{"type": []}]}, "item.content[0].type"),
    ],
)
def test_what_is_wrong_with_an_item_is_named(item: dict[str, Any], param: str) -> None:
    with pytest.raises(Fault) as caught:
        parse_item(item, "item", new_id="i", takes=("text",))

    assert caught.value.param == param


def said(role: str, text: str) -> Item:
    kind = "output_text" if role == "assistant" else "input_text"
    return Item(text, "message", role=role, parts=[{"type": kind, "text": text}])


def test_items_become_turns_of_two_people() -> None:
    items = [
        said("system", "be kind"),
        said("user", "hello"),
        said("assistant", "hi"),
        said("assistant", "there"),
        said("user", "weather?"),
        Item("c", "function_call", name="look", call_id="1", arguments='{"where": "here"}'),
        Item("o", "function_call_output", call_id="1", output="rain"),
    ]

    assert turns_of(items) == (
        (
            PastTurn("be kind hello", "hi there"),
            PastTurn("weather?", '<tool_call>{"name": "look", "arguments": {"where": "here"}}</tool_call>'),
        ),
        "<tool_response>rain</tool_response>",
    )


def test_at_its_bound_the_oldest_item_leaves() -> None:
    conversation = Conversation(items_max=2)
    left = [conversation.add(said("user", text))[1] for text in "abc"]

    assert [item.item_id for item in left if item is not None] == ["a"]
    assert [item.item_id for item in conversation] == ["b", "c"]


@pytest.mark.parametrize(
    ("after", "before", "order"),
    [
        pytest.param(None, "c", "bcn", id="at-the-end"),
        pytest.param("root", None, "nbc", id="first"),
        pytest.param("a", None, "nbc", id="behind-the-one-that-leaves"),
        pytest.param("b", "b", "bnc", id="behind-another"),
    ],
)
def test_at_its_bound_a_new_item_stands_where_it_was_asked_for(
    after: str | None, before: str | None, order: str
) -> None:
    """At root the new item itself left, told as deleted and then as added; or told to stand behind one deleted."""
    conversation = Conversation(items_max=3)
    for text in "abc":
        conversation.add(said("user", text))
    stands, left = conversation.add(said("user", "n"), after=after)

    assert (stands, left.item_id if left is not None else None) == (before, "a")
    assert "".join(item.item_id for item in conversation) == order
