"""The published prompts: held-out, spread over the categories, and good for at least 64 tokens where possible."""

import json
import re

import corpus as corpora
import decoding
import world

_TURN = re.compile(r"<\|im_(?:user|assistant|system)\|>(.*?)<\|im_middle\|>(.*?)<\|im_end\|>", re.S)
_CALL = re.compile(r"<\|tool_call_begin\|>(.*?)<\|tool_call_argument_begin\|>(.*?)<\|tool_call_end\|>", re.S)
_OPENING = "<|im_assistant|>assistant<|im_middle|>"
ENOUGH = 64


def as_request(text):
    """A conversation's prompt as the arguments of the chat template: messages, tools, thinking."""
    history, _, opening = text.rpartition(_OPENING)
    request = {"messages": [], "thinking": opening == "<think>"}
    for name, body in _TURN.findall(history):
        if name == "tool_declare":
            request["tools"] = world.chat.openai_tools(body)
        elif name == "tool":
            head, _, content = body.partition("\n")
            request["messages"].append({"role": "tool", "tool_call_id": head[len("## Return of "):],
                                        "content": content})
        elif name == "assistant":
            thought, _, content = body[len("<think>"):].partition("</think>")
            message = {"role": "assistant", "content": content.split("<|tool_calls_section_begin|>")[0]}
            if thought:
                message["reasoning"] = thought
            calls = [{"id": identity, "type": "function",
                      "function": {"name": identity.split(".")[1].split(":")[0], "arguments": arguments}}
                     for identity, arguments in _CALL.findall(content)]
            if calls:
                message["tool_calls"] = calls
            request["messages"].append(message)
        else:
            request["messages"].append({"role": name, "content": body})
    return request


def render(template, request):
    """The prompt that the chat template makes of a request of as_request."""
    import jinja2
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value, separators=None: json.dumps(value, ensure_ascii=False,
                                                                              separators=separators)
    arguments = dict(request)
    if "tools" in request:
        arguments["tools_ts_str"] = world.chat.declaration([tool["function"]["name"] for tool in request["tools"]])
    with open(template) as file:
        return environment.from_string(file.read()).render(add_generation_prompt=True, **arguments)


def publish(plan, model, encoder, held_out, template, path):
    """Writes prompts.jsonl and returns its entries with "ids" added. Conversations are only taken where the chat
    template writes exactly their text."""
    candidates = []
    for category, ids in corpora.prompts_by_category(held_out, 6 * plan.published_prompts, seed=21):
        text = encoder.decode(ids)
        entry = {"category": world.NAMES[category], "prompt": text}
        if entry["category"] in world.CONVERSATIONS:
            entry["chat"] = as_request(text)
            if render(template, entry["chat"]) != text:
                continue
        if "\ufffd" not in text and "[EOS]" not in text:
            candidates.append((entry, encoder.encode(text)))
    written = decoding.complete(model, [ids for _, ids in candidates], ENOUGH + 32)
    for (entry, ids), sequence in zip(candidates, written):
        entry["new"] = len(sequence) - len(ids)
    out = []
    for name in world.NAMES:
        mine = [item for item in candidates if item[0]["category"] == name]
        mine.sort(key=lambda item: -min(item[0]["new"], ENOUGH))  # stable: the first that are long enough
        out += mine[:plan.published_prompts]
    with open(path, "w") as file:
        for entry, _ in out:
            file.write(json.dumps({key: entry[key] for key in ("category", "prompt", "chat") if key in entry},
                                  ensure_ascii=False) + "\n")
    print("prompts: %d, of which %d go on for %d tokens" % (
        len(out), sum(entry["new"] >= ENOUGH for entry, _ in out), ENOUGH), flush=True)
    return [dict(entry, ids=ids) for entry, ids in out]
