"""Token ids from lists, arrays and buffers."""

import array
import json

import numpy
import pytest
from test_types import ROOT

import pointsman
from pointsman import Router, block_hashes, errors

TOKENIZER = ROOT / "gateway/tests/data/tokens"

TOKENS = [*range(1000, 1063), 2**32 - 1]
EXPECTED = block_hashes(TOKENS, 16)


@pytest.mark.parametrize(
    "tokens",
    [
        tuple(TOKENS),
        iter(TOKENS),
        array.array("I", TOKENS),
        array.array("Q", TOKENS),
        array.array("q", TOKENS),
        memoryview(array.array("I", TOKENS)),
        memoryview(bytes(array.array("I", TOKENS))).cast("I"),
        numpy.array(TOKENS),
        numpy.array(TOKENS, dtype=numpy.uint32),
        numpy.array(TOKENS, dtype=numpy.uint64),
        numpy.array(TOKENS, dtype="=u4"),
        numpy.array([0, *TOKENS], dtype=numpy.uint32)[1:],
    ],
    ids=lambda tokens: type(tokens).__name__ + getattr(getattr(tokens, "dtype", None), "name", ""),
)
def test_every_kind_of_sequence_has_the_same_hashes(tokens):
    assert len(EXPECTED) == 4
    assert block_hashes(tokens, 16) == EXPECTED


def test_signed_and_short_integers_are_read():
    small = [1, 2, 3, 4]
    for tokens in (array.array("i", small), array.array("l", small), array.array("H", small), numpy.array(small, "i4")):
        assert block_hashes(tokens, 4) == block_hashes(small, 4)
    assert block_hashes([], 4) == block_hashes(numpy.array([], dtype=numpy.uint32), 4) == []


@pytest.mark.parametrize(
    ("tokens", "error", "named"),
    [
        ([1, -1], OverflowError, "-1"),
        ([1, 2**32], OverflowError, "4294967296"),
        (numpy.array([1, -1]), OverflowError, "-1"),
        (array.array("i", [1, -7]), OverflowError, "-7"),
        (numpy.array([2**32], dtype=numpy.uint64), OverflowError, "4294967296"),
        ([1, "2"], TypeError, "str"),
        ([1.5], TypeError, "float"),
        (numpy.array([1.5]), TypeError, "'d'"),
        (b"bytes", TypeError, "'B'"),
        ("text", TypeError, "str"),
        (7, TypeError, "int"),
        (numpy.arange(8, dtype=numpy.uint32)[::2], ValueError, "contiguous"),
        (numpy.zeros((2, 2), dtype=numpy.uint32), ValueError, "2 dimensions"),
        (numpy.array([1], dtype=">u4"), TypeError, ">I"),
        (numpy.frombuffer(b"x" * 9, dtype=numpy.uint8)[1:].view(numpy.uint32), ValueError, "aligned"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_other_values_are_errors_that_name_them(tokens, error, named):
    with pytest.raises(error, match=named):
        block_hashes(tokens, 1)


def test_a_buffer_is_released_after_the_call():
    tokens = array.array("I", TOKENS)
    block_hashes(tokens, 16)
    tokens.append(1)  # an error while a view of it exists
    with pytest.raises(ValueError, match="block_size"):
        block_hashes(tokens, 0)


def test_adapters_and_salts_change_the_hashes():
    assert len({*(tuple(block_hashes(TOKENS, 16, **with_)) for with_ in ({}, {"lora_name": "a"}, {"cache_salt": "a"}))}) == 3
    assert pointsman.__version__


def test_texts_and_conversations_have_the_tokens_of_the_gateway(run):
    cases = json.loads((TOKENIZER / "expected.json").read_text())
    chats = [case for case in cases["chats"] if case["template"] is None]
    assert len(chats) > 3 and len(cases["texts"]) > 3

    async def scenario():
        async with Router(block_size=16, workers=["http://a"], tokenizer=TOKENIZER) as router:
            for case in cases["texts"]:
                assert list(await router.tokenize(case["text"])) == case["ids"], case
            for case in chats:
                fields = {name: case[name] for name in ("messages", "tools", "add_generation_prompt", "continue_final_message")}
                ids = await router.tokenize(**fields, chat_template_kwargs=case["kwargs"])
                assert list(ids) == case["ids"], case["name"]
            placement = await router.route("Hello", "named")
            assert placement.request_id == "named"
            conversation = [{"role": "user", "content": "Hello"}]
            async with await router.route(messages=conversation, session_id="s") as placement:
                assert placement.facts()["cached_tokens"] == 0
            explained = await router.explain(messages=conversation)
            assert explained["prompt_tokens"] == len(await router.tokenize(messages=conversation))
            image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://a/b.png"}}]}]
            with pytest.raises(errors.InvalidArgument) as unknown:
                await router.route(messages=image)
            assert unknown.value.reason == "no_tokens"
            with pytest.raises(TypeError, match="a prompt is one of"):
                await router.route()
            with pytest.raises(TypeError, match="a prompt is one of"):
                await router.route("Hello", messages=conversation)

    run(scenario())


def test_texts_without_a_tokenizer_and_unusable_files_are_errors(run):
    async def scenario():
        async with Router(workers=["http://a"]) as router:
            for call in (lambda: router.route("Hello"), lambda: router.explain(messages=[])):
                with pytest.raises(ValueError, match="tokenizer="):
                    await call()
        with pytest.raises(errors.StartError, match="no_such_file") as unreadable:
            await Router(workers=["http://a"], tokenizer="/no_such_file").start()
        assert unreadable.value.reason == "tokenizer"
        with pytest.raises(RuntimeError, match="has not started"):
            await Router().route("Hello")

    run(scenario())
