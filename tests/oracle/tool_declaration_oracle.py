#!/usr/bin/env python3
"""Tools as TypeScript by the encoder that ships with Kimi K2.5's tokenizer, of which PyPI's tinker-cookbook carries a copy.

  tool_declaration_oracle.py golden OUT.json        remakes tests/goldens/chat_template/tools_ts.json
  tool_declaration_oracle.py fuzz SEED COUNT        prints random tools with their declaration, one JSON object a line

Needs: pip install --no-deps tinker-cookbook.  Exits with 77 where it is missing.
"""
import importlib.util
import json
import pathlib
import random
import sys


def reference():
    package = importlib.util.find_spec("tinker_cookbook")
    if package is None:
        sys.stderr.write("tool_declaration_oracle.py: PyPI tinker-cookbook is not installed\n")
        sys.exit(77)
    # By its path: the package's own imports need much that this file does not.
    path = pathlib.Path(package.submodule_search_locations[0]) / "renderers/kimi_k2_5_tool_declaration_ts.py"
    spec = importlib.util.spec_from_file_location("tool_declaration_ts", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["tool_declaration_ts"] = module
    spec.loader.exec_module(module)
    return module.encode_tools_to_typescript_style


def sort_keys(value):
    if isinstance(value, dict):
        return {key: sort_keys(value[key]) for key in sorted(value)}
    if isinstance(value, list):
        return [sort_keys(item) for item in value]
    return value


def declare(tools):
    """The declaration, or None where there is none or the encoder fails: JSON is declared then."""
    try:
        return REFERENCE(sort_keys(tools)) or None
    except Exception:
        return None


def function(parameters, description="Does it.", name="f"):
    return [{"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}]


def properties(**fields):
    return {"type": "object", "properties": fields}


NODE = {"type": "object", "description": "A node.\n\nOf a tree.",
        "properties": {"value": {"type": "integer"}, "next": {"$ref": "#/$defs/Node"}}, "required": ["value"]}
CASES = [
    function(None), function({}), function(properties()), function(properties(a={"type": "string"}), "Two\n\nlines."),
    function({**properties(b={"type": "string"}, a={"type": "integer"}, c={"type": "boolean"}), "required": ["c", "b"]}),
    function(properties(s={"type": "string", "description": "A name.\nOf one.", "minLength": 1, "maxLength": 64,
                           "pattern": "^[a-z]+$", "default": "é\"\n"},
                        n={"type": "number", "minimum": -1.5, "maximum": 1e16, "default": 1e-05},
                        i={"type": "integer", "minimum": 0, "default": 7}, t={"type": "boolean", "default": True})),
    function(properties(a={"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 3,
                           "default": ["x", {"k": 1.0}]},
                        b={"type": "array"}, c={"type": "array", "items": {"type": "number", "description": "Each."}},
                        d={"type": "array", "items": properties(x={"type": "array", "items": {"enum": [1, None, True]}})})),
    function(properties(e={"enum": ["a", "b", 1, 2.5, None, True]}, u={"type": ["string", "null", "object", "array", "integer"]},
                        v={"anyOf": [{"type": "string"}, properties(q={"type": "null"}), {"type": "array", "items": {}}]},
                        w={}, x={"type": "string", "enum": ["on", "off"], "description": "Switch."})),
    function({**properties(a={"type": "string"}), "additionalProperties": False}),
    function({**properties(), "additionalProperties": True}),
    function({**properties(m={**properties(), "additionalProperties": {"type": "integer"}}), "additionalProperties": {}}),
    function({**properties(tree={"$ref": "#/$defs/Node"}), "$defs": {"Node": NODE, "Alias": {"type": ["string", "null"]}}}),
    function({**properties(children={"type": "array", "items": {"$ref": "#"}}, name={"type": "string"}), "required": ["name"]}),
    function(properties(r={"$ref": "#/$defs/Missing"})), function(properties(r={"$ref": "other.json"})),
    function(properties(e={"type": "integer", "enum": [1, "two"]})), function(properties(z={"title": "nothing else"})),
    [{"type": "web_search"}], [{"type": "web_search"}, *function(properties())], [{"type": "function", "function": {}}],
    [*function(properties(a={"type": "string"}), name="first"), *function(properties(), description="", name="second")],
    [{"type": "function", "function": {"description": "No name."}}],
    function(properties(**{"日本": {"type": "string", "description": "名前"}, "Zed": {"type": "string"}, "a": {"type": "string"}})),
]


def random_schema(rng, depth=0):
    out = {}
    roll = rng.random()
    if rng.random() < 0.4:
        out["description"] = rng.choice(["Short.", "Two\nlines", "é 世界", "", "trailing\n"])
    if rng.random() < 0.25:
        out["default"] = rng.choice([1, -2.5, 1e20, "x", "a\tb\"", True, False, None, [], [1, "é"], {"b": 1, "a": [None]}, 0])
    if roll < 0.05:
        return rng.choice([True, False, {}, {"description": "typeless"}])
    if roll < 0.15:
        return {**out, "enum": rng.sample(["a", "b c", 1, 2, 0.5, None, True, False], rng.randint(0, 4)),
                **({"type": rng.choice(["string", "number", "integer", "boolean", ["string", "null"], ["null"]])}
                   if rng.random() < 0.4 else {})}
    if roll < 0.25:
        return {**out, "anyOf": [random_schema(rng, depth + 1) for _ in range(rng.randint(0, 3))]}
    if roll < 0.35:
        return {**out, "$ref": rng.choice(["#", "#/$defs/A", "#/$defs/B", "#/$defs/A", "#/$defs/C", "x"][: rng.choice([3, 3, 6])])}
    if roll < 0.42:
        return {**out, "type": rng.sample(["string", "null", "integer", "number", "boolean", "object", "array", "date"],
                                          rng.randint(1, 3))}
    if roll < 0.6 and depth < 4:
        out["type"] = "object"
        if rng.random() < 0.9:
            names = rng.sample(["a", "b", "c", "Z", "_x", "é"], rng.randint(0, 4))
            out["properties"] = {name: random_schema(rng, depth + 1) for name in names}
            if rng.random() < 0.6:
                out["required"] = rng.sample(names + ["other"], rng.randint(0, len(names)))
        if rng.random() < 0.3:
            out["additionalProperties"] = rng.choice([True, False, None, {}, random_schema(rng, depth + 1)])
        if rng.random() < 0.2:
            out["$defs"] = {name: random_schema(rng, depth + 1) for name in rng.sample(["A", "B", "C"], rng.randint(0, 2))}
        return out
    if roll < 0.75 and depth < 4:
        out["type"] = "array"
        if rng.random() < 0.8:
            out["items"] = random_schema(rng, depth + 1)
        for key in ("minItems", "maxItems"):
            if rng.random() < 0.2:
                out[key] = rng.randint(0, 5)
        return out
    out["type"] = rng.choice(["string", "number", "integer", "boolean", "null", "any"])
    for key, value in (("minLength", 1), ("maxLength", 9), ("pattern", "^a|b$"), ("minimum", -1.25), ("maximum", 10**12)):
        if rng.random() < 0.2:
            out[key] = value
    return out


def random_tools(rng):
    tools = []
    for i in range(rng.randint(1, 3)):
        parameters = random_schema(rng)
        if not isinstance(parameters, dict) or rng.random() < 0.7:
            parameters = {"type": "object", "properties": {name: random_schema(rng, 1) for name in "pq"[: rng.randint(0, 2)]},
                          "required": rng.sample(["p", "q"], rng.randint(0, 2)),
                          "$defs": {"A": random_schema(rng, 2), "B": random_schema(rng, 2)}}
        tools += function(parameters, rng.choice(["Does.", "", "A\n\nB"]), f"f{i}")
    return tools


def main():
    if len(sys.argv) == 3 and sys.argv[1] == "golden":
        rng = random.Random(7)
        tools = CASES + [random_tools(rng) for _ in range(150)]
        cases = [{"tools": one, "typescript": declare(one)} for one in tools]
        pathlib.Path(sys.argv[2]).write_text(
            "[" + ",\n".join(json.dumps(case, ensure_ascii=True, separators=(",", ":")) for case in cases) + "]\n")
    elif len(sys.argv) == 4 and sys.argv[1] == "fuzz":
        rng = random.Random(int(sys.argv[2]))
        for _ in range(int(sys.argv[3])):
            tools = random_tools(rng)
            print(json.dumps({"tools": tools, "typescript": declare(tools)}))
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    REFERENCE = reference()
    main()
