"""Formats of agents: chat completions, Responses and Messages, as vLLM and SGLang serve them."""

import json
import uuid
from typing import NamedTuple

MODEL = "mock"
PROMPT_TOKENS = 20_000


class Call(NamedTuple):
    """A tool call: its place in a stream of chat completions, and the text that its result contains."""

    id: str
    index: int
    name: str
    arguments: dict
    result: str


class Chat:
    """`/v1/chat/completions`."""

    END = b"data: [DONE]\n\n"
    USAGE = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": 9, "total_tokens": PROMPT_TOKENS + 9}

    @staticmethod
    def results(body):
        return {one["tool_call_id"]: text_of(one["content"]) for one in body["messages"] if one["role"] == "tool"}

    @classmethod
    def whole(cls, text, calls):
        made = [{"id": call.id, "type": "function", "function": {"name": call.name, "arguments": json.dumps(call.arguments)}}
                for call in calls]
        message = {"role": "assistant", "content": text, "tool_calls": made}
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if calls else "stop"}
        return {**head_of("chatcmpl", "chat.completion"), "choices": [choice], "usage": cls.USAGE}

    @classmethod
    def events(cls, kind, text, calls):
        """Arguments come in two parts. vLLM leaves out what the second one lacks, and SGLang sends null."""
        head = head_of("chatcmpl", "chat.completion.chunk")
        chunk = lambda delta, reason=None: {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}
        thought = "reasoning" if kind == "vllm" else "reasoning_content"
        events = [chunk({"role": "assistant", "content": ""}), chunk({thought: "Let me "}), chunk({thought: "see."}), chunk({"content": text})]
        for call in calls:
            start = {"index": call.index, "id": call.id, "type": "function", "function": {"name": call.name, "arguments": ""}}
            absent = ({}, {}) if kind == "vllm" else ({"id": None, "type": "function"}, {"name": None})
            parts = [{"index": call.index, **absent[0], "function": {**absent[1], "arguments": half}} for half in halves(call.arguments)]
            events += [chunk({"tool_calls": [part]}) for part in [start, *parts]]
        return [*events, chunk({}, "tool_calls" if calls else "stop"), {**head, "choices": [], "usage": cls.USAGE}]

    @staticmethod
    def event(event):
        return f"data: {json.dumps(event)}\n\n".encode()


class Messages:
    """`/v1/messages`."""

    END = b""

    @staticmethod
    def results(body):
        blocks = [block for one in body["messages"] if isinstance(one["content"], list) for block in one["content"]]
        return {one["tool_use_id"]: text_of(one.get("content", "")) for one in blocks if one["type"] == "tool_result"}

    @classmethod
    def whole(cls, text, calls):
        content = [{"type": "text", "text": text}]
        content += [{"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments} for call in calls]
        usage = {"input_tokens": PROMPT_TOKENS, "output_tokens": 9}
        return {"id": new_id("msg"), "type": "message", "role": "assistant", "model": MODEL, "content": content,
                "stop_reason": "tool_use" if calls else "end_turn", "stop_sequence": None, "usage": usage}

    @classmethod
    def events(cls, _, text, calls):
        message = cls.whole(text, calls)
        events = [{"type": "message_start", "message": {**message, "content": [], "stop_reason": None}}]
        for index, block in enumerate(message["content"]):
            if block["type"] == "text":
                empty, deltas = {"text": ""}, [{"type": "text_delta", "text": text}]
            else:
                empty, deltas = {"input": {}}, [{"type": "input_json_delta", "partial_json": half} for half in halves(block["input"])]
            events.append({"type": "content_block_start", "index": index, "content_block": {**block, **empty}})
            events += [{"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas]
            events.append({"type": "content_block_stop", "index": index})
        end = {"stop_reason": message["stop_reason"], "stop_sequence": None}
        return [*events, {"type": "message_delta", "delta": end, "usage": message["usage"]}, {"type": "message_stop"}]

    @staticmethod
    def event(event):
        return f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode()


class Responses:
    """`/v1/responses`."""

    END, event = b"", Messages.event

    @staticmethod
    def results(body):
        return {one["call_id"]: text_of(one["output"]) for one in body["input"] if one.get("type") == "function_call_output"}

    @classmethod
    def whole(cls, text, calls):
        part = {"type": "output_text", "text": text, "annotations": []}
        output = [{"type": "message", "id": new_id("msg"), "role": "assistant", "status": "completed", "content": [part]}]
        output += [{"type": "function_call", "id": new_id("fc"), "call_id": call.id, "name": call.name, "status": "completed",
                    "arguments": json.dumps(call.arguments)} for call in calls]
        usage = {"input_tokens": PROMPT_TOKENS, "input_tokens_details": {"cached_tokens": 0}, "output_tokens": 9,
                 "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": PROMPT_TOKENS + 9}
        return {"id": new_id("resp"), "object": "response", "created_at": 1, "status": "completed", "model": MODEL,
                "output": output, "usage": usage}

    @classmethod
    def events(cls, _, text, calls):
        response = cls.whole(text, calls)
        events = [{"type": "response.created", "response": {**response, "status": "in_progress", "output": [], "usage": None}}]
        for index, item in enumerate(response["output"]):
            at = {"output_index": index, "item_id": item["id"]}
            if item["type"] == "message":
                empty, parts = {"content": []}, [{"type": "response.output_text.delta", "content_index": 0, "delta": text, **at}]
            else:
                empty, arguments = {"arguments": ""}, item["arguments"]
                parts = [{"type": "response.function_call_arguments.delta", "delta": part, **at} for part in (arguments[:9], arguments[9:])]
                parts.append({"type": "response.function_call_arguments.done", "arguments": arguments, "name": item["name"], **at})
            added = {**item, **empty, "status": "in_progress"}
            events += [{"type": "response.output_item.added", "output_index": index, "item": added}, *parts,
                       {"type": "response.output_item.done", "output_index": index, "item": item}]
        events.append({"type": "response.completed", "response": response})
        return [{**event, "sequence_number": n} for n, event in enumerate(events)]


FORMS = {"/v1/chat/completions": Chat, "/v1/messages": Messages, "/v1/responses": Responses}


def tool_names(body):
    """Names of the tools of a request in any format."""
    return [tool.get("name") or tool.get("function", {}).get("name") for tool in body.get("tools") or []]


def new_id(kind):
    """Unique, as of engines: Claude Code takes messages of one id for one message."""
    return f"{kind}-{uuid.uuid4().hex}"


def head_of(kind, name):
    return {"id": new_id(kind), "object": name, "created": 1, "model": MODEL}


def text_of(content):
    return content if isinstance(content, str) else json.dumps(content)


def halves(arguments):
    text = json.dumps(arguments)
    return text[: len(text) // 2], text[len(text) // 2 :]
