"""LiteLLM and LangChain: each provider as an object with the same five methods."""

import json

import litellm
import openai
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI

litellm.suppress_debug_info = True

QUESTION = "Weather in Bern and Oslo?"
SCHEMA = {"title": "weather", "type": "object", "properties": {"city": {"type": "string"}, "degrees": {"type": "integer"}},
          "required": ["city", "degrees"], "additionalProperties": False}
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Weather of a city.", "parameters": PARAMETERS}}
RESULTS = {"Bern": "7", "Oslo": "9"}


class LiteLlm:
    def __init__(self, model, base):
        self.usual = {"model": model, "api_base": base, "api_key": "none", "max_tokens": 100, "num_retries": 0, "max_retries": 0}

    def ask(self, messages, **more):
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        return litellm.completion(messages=messages, **self.usual, **more)

    def chat(self):
        return self.ask("Hello.").choices[0].message.content

    def stream(self):
        return "".join(part.choices[0].delta.content or "" for part in self.ask("Hello.", stream=True))

    def tools(self, stream):
        messages = [{"role": "user", "content": QUESTION}]
        answer = self.ask(messages, tools=[TOOL], stream=stream)
        if stream:
            answer = litellm.stream_chunk_builder(list(answer), messages=messages)
        message = answer.choices[0].message
        calls = [(call.id, call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls]
        results = [{"role": "tool", "tool_call_id": name, "content": RESULTS[arguments["city"]]} for name, _, arguments in calls]
        text = self.ask([*messages, message.model_dump(), *results], tools=[TOOL]).choices[0].message.content
        return [call[1:] for call in calls], text

    def structured(self):
        schema = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA, "strict": True}}
        return json.loads(self.ask("Weather.", response_format=schema).choices[0].message.content)

    def error(self, text, stream):
        try:
            list(self.ask(text, stream=stream))
        except openai.APIError as error:  # the base of all errors of LiteLLM
            return error.status_code, error.message


class LangChain:
    def __init__(self, model):
        self.model = model

    def chat(self):
        return self.model.invoke("Hello.").text

    def stream(self):
        return "".join(part.text for part in self.model.stream("Hello."))

    def tools(self, stream):
        bound, messages = self.model.bind_tools([TOOL]), [HumanMessage(QUESTION)]
        if stream:
            first, *parts = bound.stream(messages)
            for part in parts:
                first += part
        else:
            first = bound.invoke(messages)
        results = [ToolMessage(RESULTS[call["args"]["city"]], tool_call_id=call["id"]) for call in first.tool_calls]
        calls = [(call["name"], call["args"]) for call in first.tool_calls]
        return calls, bound.invoke([*messages, first, *results]).text

    def structured(self):
        return self.model.with_structured_output(SCHEMA, method="json_schema").invoke("Weather.")

    def error(self, text, stream):
        try:
            list(self.model.stream(text)) if stream else self.model.invoke(text)
        except Exception as error:  # of the SDKs below: those of OpenAI and Anthropic have no common class
            return getattr(error, "status_code", type(error).__name__), str(error)


def clients(url):
    """Clients by name. `passed` is the model whose engine speaks Messages."""
    openai_like = {"base_url": f"{url}/v1", "api_key": "none", "max_retries": 0}
    anthropic_like = {"base_url": url, "api_key": "none", "max_retries": 0, "max_tokens": 100}
    return {
        "litellm openai": LiteLlm("openai/mock", f"{url}/v1"),
        "litellm hosted_vllm": LiteLlm("hosted_vllm/mock", f"{url}/v1"),
        "litellm anthropic": LiteLlm("anthropic/mock", url),
        "litellm anthropic, pass": LiteLlm("anthropic/passed", url),
        "langchain openai": LangChain(ChatOpenAI(model="mock", **openai_like)),
        "langchain responses": LangChain(ChatOpenAI(model="mock", use_responses_api=True, **openai_like)),
        "langchain anthropic": LangChain(ChatAnthropic(model="mock", **anthropic_like)),
        "langchain anthropic, pass": LangChain(ChatAnthropic(model="passed", **anthropic_like)),
    }
