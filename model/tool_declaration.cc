#include "model/tool_declaration.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"

namespace coppice {
namespace {

using nlohmann::json;

constexpr char kIndent[] = "  ";

// Python's repr of a float: the shortest digits that read back, in fixed notation from 1e-4 to
// below 1e16.
std::string PythonFloat(double value) {
  char buffer[64];
  const double magnitude = std::abs(value);
  const bool fixed = magnitude == 0 || (magnitude >= 1e-4 && magnitude < 1e16);
  const auto result =
      std::to_chars(buffer, buffer + sizeof(buffer), value,
                    fixed ? std::chars_format::fixed : std::chars_format::scientific);
  std::string text(buffer, result.ptr);
  if (fixed && text.find('.') == std::string::npos) text += ".0";
  return text;
}

template <typename Json>
std::string Number(const Json& value) {
  return value.is_number_float() ? PythonFloat(value.template get<double>()) : value.dump();
}

template <typename Json>
void Dump(const Json& value, const char* item_separator, const char* key_separator,
          std::string* out) {
  if (value.is_object() || value.is_array()) {
    *out += value.is_object() ? '{' : '[';
    bool first = true;
    for (const auto& [key, item] : value.items()) {
      if (!first) *out += item_separator;
      first = false;
      if (value.is_object()) *out += Json(key).dump() + key_separator;
      Dump(item, item_separator, key_separator, out);
    }
    *out += value.is_object() ? '}' : ']';
  } else {
    *out += value.is_number() ? Number(value) : value.dump();
  }
}

// What Python holds for false.
bool Falsy(const json& value) {
  return value.is_null() || (value.is_boolean() && !value.get<bool>()) ||
         (value.is_number() && value.get<double>() == 0) ||
         (value.is_string() && value.get_ref<const std::string&>().empty()) ||
         (value.is_structured() && value.empty());
}

// Python's str of a scalar; numbers and constants as Python spells them.
std::optional<std::string> PythonText(const json& value) {
  if (value.is_string()) return value.get<std::string>();
  if (value.is_null()) return "None";
  if (value.is_boolean()) return value.get<bool>() ? "True" : "False";
  if (value.is_number()) return Number(value);
  return std::nullopt;
}

std::string CommentLines(const std::string& text, const std::string& indent) {
  return absl::StrJoin(absl::StrSplit(text, '\n'), "\n",
                       [&](std::string* out, absl::string_view line) {
                         if (!line.empty()) absl::StrAppend(out, indent, "// ", line);
                       });
}

// One function's declaration.  Every method returns nothing where the reference raises an
// exception.
//
// References are checked while schemas are parsed, by what has been registered until then, and
// types are written afterwards; both walks are kept, because a definition may come too late.
class FunctionWriter {
 public:
  std::optional<std::string> Write(const json& function) {
    if (!function.is_object()) return std::nullopt;
    static const json kNone = json::object();
    const json& given = Member(function, "parameters");
    const json& parameters = Falsy(given) ? kNone : given;
    if (!parameters.is_object() || !ParseObject(parameters)) return std::nullopt;

    const bool self_reference = self_reference_;
    std::vector<std::string> parts;
    if (self_reference) {
      std::vector<std::string> fields;
      for (const auto& [name, schema] : Properties(parameters).items()) {
        const std::optional<std::string> field =
            Field(name, schema, IsOptional(parameters, name), kIndent);
        if (!field) return std::nullopt;
        fields.push_back(*field);
      }
      const std::string joined = absl::StrJoin(fields, ",\n");
      parts.push_back(joined.empty() ? "interface parameters {}"
                                     : absl::StrCat("interface parameters {\n", joined, "\n}"));
    }
    const std::vector<std::pair<std::string, json>> definitions = definitions_;
    for (const auto& [name, schema] : definitions) {
      if (!schema.is_object() || !Parse(schema)) return std::nullopt;
      const std::optional<std::string> type = Type(schema, "");
      if (!type) return std::nullopt;
      std::string text;
      if (const json& description = Member(schema, "description"); !Falsy(description)) {
        if (!description.is_string()) return std::nullopt;
        text = CommentLines(description.get<std::string>(), "") + "\n";
      }
      parts.push_back(absl::StrCat(text, "interface ", name, " ", *type));
    }
    if (const json& description = Member(function, "description"); !Falsy(description)) {
      if (!description.is_string()) return std::nullopt;
      const std::string lines = CommentLines(description.get<std::string>(), "");
      if (!lines.empty()) parts.push_back(lines);
    }
    const std::optional<std::string> name =
        function.contains("name") ? PythonText(function["name"]) : "function";
    std::optional<std::string> type = "parameters";
    if (!self_reference) type = Object(parameters, "");
    if (!name || !type) return std::nullopt;
    parts.push_back(absl::StrCat("type ", *name, " = (_: ", *type, ") => any;"));
    return absl::StrJoin(parts, "\n");
  }

 private:
  static const json& Member(const json& object, const char* key) {
    static const json kNull;
    const auto it = object.find(key);
    return it == object.end() ? kNull : *it;
  }

  // A member of a list of types, as it is written.
  static std::optional<std::string> UnionName(const json& name) {
    constexpr std::pair<const char*, const char*> kNames[] = {
        {"string", "string"}, {"number", "number"}, {"integer", "number"},  {"boolean", "boolean"},
        {"null", "null"},     {"object", "{}"},     {"array", "Array<any>"}};
    for (const auto& [json_name, written] : kNames) {
      if (name == json_name) return written;
    }
    return std::nullopt;
  }

  static const json& Properties(const json& schema) {
    static const json kNone = json::object();
    return schema.contains("properties") ? schema["properties"] : kNone;
  }

  static bool IsOptional(const json& schema, const std::string& name) {
    const json& required = Member(schema, "required");
    return !required.is_array() ||
           std::find(required.begin(), required.end(), json(name)) == required.end();
  }

  // --- parsing: false where the reference fails

  bool Parse(const json& schema) {
    if (schema.is_boolean()) return true;
    if (!schema.is_object()) return false;
    if (schema.contains("$ref")) return ParseReference(schema["$ref"]);
    if (schema.contains("anyOf")) {
      const json& types = schema["anyOf"];
      return types.is_array() &&
             std::all_of(types.begin(), types.end(), [&](const json& t) { return Parse(t); });
    }
    if (schema.contains("enum")) return CheckEnum(schema);
    if (!schema.contains("type")) return schema.empty();
    const json& type = schema["type"];
    if (type.is_array()) {
      return std::all_of(type.begin(), type.end(),
                         [](const json& name) { return UnionName(name).has_value(); });
    }
    if (!type.is_string()) return false;
    if (type == "object") return ParseObject(schema);
    if (type == "array") {
      const json& items = Member(schema, "items");
      return Falsy(items) || Parse(items);
    }
    return true;
  }

  bool ParseReference(const json& reference) {
    if (!reference.is_string()) return false;
    const std::string& text = reference.get_ref<const std::string&>();
    if (text == "#") return self_reference_ = true;
    if (text.rfind("#/$defs/", 0) != 0) return false;
    const std::string name = text.substr(text.rfind('/') + 1);
    const auto found = std::find_if(definitions_.begin(), definitions_.end(),
                                    [&](const auto& entry) { return entry.first == name; });
    return found != definitions_.end() && found->second.is_object();
  }

  static bool CheckEnum(const json& schema) {
    const json& values = schema["enum"];
    if (!values.is_array()) return false;
    if (!schema.contains("type")) return true;
    json type = schema["type"];
    if (type.is_array()) {
      if (type.size() == 1) {
        type = json(type[0]);
      } else if (type.size() == 2 && std::find(type.begin(), type.end(), "null") != type.end()) {
        type = json(type[0] != "null" ? type[0] : type[1]);
      } else {
        return false;
      }
    }
    return std::all_of(values.begin(), values.end(), [&](const json& value) {
      if (value.is_null()) return true;
      // A Python bool is an int.
      if (type == "string") return value.is_string();
      if (type == "number") return value.is_number() || value.is_boolean();
      if (type == "integer") return value.is_number_integer() || value.is_boolean();
      return type != "boolean" || value.is_boolean();
    });
  }

  bool ParseObject(const json& schema) {
    if (schema.contains("$defs") && !Falsy(schema["$defs"])) {
      if (!schema["$defs"].is_object()) return false;
      for (const auto& [name, definition] : schema["$defs"].items()) {
        const auto known = std::find_if(definitions_.begin(), definitions_.end(),
                                        [&, &key = name](const auto& e) { return e.first == key; });
        if (known == definitions_.end()) {
          definitions_.emplace_back(name, definition);
        } else {
          known->second = definition;
        }
      }
    }
    const json& additional = Member(schema, "additionalProperties");
    if (additional.is_object() && !Parse(additional)) return false;
    if (!schema.contains("properties")) return true;
    if (!schema["properties"].is_object()) return false;
    if (schema.contains("required") && !schema["required"].is_array()) return false;
    for (const auto& [name, property] : schema["properties"].items()) {
      if (!Parse(property)) return false;
    }
    return true;
  }

  // --- writing

  std::optional<std::string> Field(const std::string& name, const json& schema, bool optional,
                                   const std::string& indent) {
    std::optional<std::string> comments = Comments(schema, indent);
    const std::optional<std::string> type = Type(schema, indent);
    if (!comments || !type) return std::nullopt;
    if (schema.is_object()) {
      if (const json& value = Member(schema, "default"); !value.is_null()) {
        const std::string text = value.is_boolean() || value.is_number()
                                     ? *PythonText(value)
                                     : PythonJson(value, ", ", ": ");
        absl::StrAppend(&*comments, indent, "// Default: ", text, "\n");
      }
    }
    return absl::StrCat(*comments, indent, name, optional ? "?" : "", ": ", *type);
  }

  // The comment lines that stand before a type: its description, then its constraints.
  std::optional<std::string> Comments(const json& schema, const std::string& indent) {
    std::string lines;
    if (!schema.is_object()) return lines;
    if (const json& description = Member(schema, "description"); !Falsy(description)) {
      if (!description.is_string()) return std::nullopt;
      absl::StrAppend(&lines, CommentLines(description.get<std::string>(), indent), "\n");
    }
    std::vector<const char*> keys;
    if (!schema.contains("$ref") && !schema.contains("anyOf") && !schema.contains("enum")) {
      const json& type = Member(schema, "type");
      if (type == "string") keys = {"maxLength", "minLength", "pattern"};
      if (type == "number" || type == "integer") keys = {"maximum", "minimum"};
      if (type == "array") keys = {"maxItems", "minItems"};
    }
    std::vector<std::string> constraints;
    for (const char* key : keys) {
      if (!schema.contains(key)) continue;
      const std::optional<std::string> text = PythonText(schema[key]);
      if (!text) return std::nullopt;
      constraints.push_back(absl::StrCat(key, ": ", *text));
    }
    if (!constraints.empty()) {
      absl::StrAppend(&lines, indent, "// ", absl::StrJoin(constraints, ", "), "\n");
    }
    return lines;
  }

  std::optional<std::string> Type(const json& schema, const std::string& indent) {
    if (schema.is_boolean()) return schema.get<bool>() ? "any" : "null";
    if (schema.contains("$ref")) {
      const std::string text = schema["$ref"].get<std::string>();
      return text == "#" ? "parameters" : text.substr(text.rfind('/') + 1);
    }
    std::vector<std::string> choices;
    if (schema.contains("anyOf")) {
      for (const json& choice : schema["anyOf"]) {
        const std::optional<std::string> type = Type(choice, indent);
        if (!type) return std::nullopt;
        choices.push_back(*type);
      }
      return absl::StrJoin(choices, " | ");
    }
    if (schema.contains("enum")) {
      for (const json& value : schema["enum"]) {
        const std::optional<std::string> text = PythonText(value);
        if (!text) return std::nullopt;
        choices.push_back(value.is_string() ? absl::StrCat("\"", *text, "\"") : *text);
      }
      return absl::StrJoin(choices, " | ");
    }
    if (schema.empty()) return "any";
    const json& type = schema["type"];
    if (type.is_array()) {
      for (const json& name : type) choices.push_back(*UnionName(name));
      return absl::StrJoin(choices, " | ");
    }
    if (type == "object") return Object(schema, indent);
    if (type == "array") return Array(schema, indent);
    return type == "integer" ? "number" : type.get<std::string>();
  }

  std::optional<std::string> Array(const json& schema, const std::string& indent) {
    static const json kAny = true;
    const json& given = Member(schema, "items");
    const json& items = Falsy(given) ? kAny : given;
    const std::string inner = indent + kIndent;
    const std::optional<std::string> comments = Comments(items, inner);
    if (!comments) return std::nullopt;
    const std::optional<std::string> type = Type(items, comments->empty() ? indent : inner);
    if (!type) return std::nullopt;
    if (comments->empty()) return absl::StrCat("Array<", *type, ">");
    return absl::StrCat("Array<\n", *comments, inner, *type, "\n", indent, ">");
  }

  std::optional<std::string> Object(const json& schema, const std::string& indent) {
    const std::string inner = indent + kIndent;
    std::vector<std::string> fields;
    for (const bool optional : {false, true}) {
      for (const auto& [name, property] : Properties(schema).items()) {
        if (IsOptional(schema, name) != optional) continue;
        const std::optional<std::string> field = Field(name, property, optional, inner);
        if (!field) return std::nullopt;
        fields.push_back(*field);
      }
    }
    if (const json& additional = Member(schema, "additionalProperties"); !additional.is_null()) {
      std::optional<std::string> type;
      if (additional.is_boolean()) {
        type = additional.get<bool>() ? "any" : "never";
      } else if (additional.is_object()) {
        type = Type(additional, inner);
      }
      if (!type) return std::nullopt;
      fields.push_back(absl::StrCat(inner, "[k: string]: ", *type));
    }
    if (fields.empty()) return "{}";
    return absl::StrCat("{\n", absl::StrJoin(fields, ",\n"), "\n", indent, "}");
  }

  std::vector<std::pair<std::string, json>> definitions_;  // in order of registration
  bool self_reference_ = false;
};

}  // namespace

std::string PythonJson(const nlohmann::ordered_json& value, const char* item_separator,
                       const char* key_separator) {
  std::string out;
  Dump(value, item_separator, key_separator, &out);
  return out;
}

std::string PythonJson(const json& value, const char* item_separator, const char* key_separator) {
  std::string out;
  Dump(value, item_separator, key_separator, &out);
  return out;
}

std::optional<std::string> TypeScriptTools(const json& tools) {
  std::vector<std::string> functions;
  for (const json& tool : tools) {
    if (!tool.is_object()) return std::nullopt;
    if (!tool.contains("type") || tool["type"] != "function") continue;
    if (!tool.contains("function") || Falsy(tool["function"])) continue;
    std::optional<std::string> text = FunctionWriter().Write(tool["function"]);
    if (!text) return std::nullopt;
    functions.push_back(*std::move(text));
  }
  if (functions.empty()) return std::nullopt;
  return absl::StrCat("# Tools\n\n## functions\nnamespace functions {\n",
                      absl::StrJoin(functions, "\n"), "\n}\n");
}

}  // namespace coppice
