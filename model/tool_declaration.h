// How tools are declared in a prompt: as JSON, or, from Kimi K2.5 on, as TypeScript.
#ifndef COPPICE_MODEL_TOOL_DECLARATION_H_
#define COPPICE_MODEL_TOOL_DECLARATION_H_

#include <optional>
#include <string>

#include "nlohmann/json.hpp"

namespace coppice {

// `value` as Python's json.dumps(value, ensure_ascii=False, separators=(item_separator,
// key_separator)) writes it, numbers included; keys in the order that `value` has them.  Strings
// must be valid UTF-8.
std::string PythonJson(const nlohmann::ordered_json& value, const char* item_separator = ",",
                       const char* key_separator = ":");
std::string PythonJson(const nlohmann::json& value, const char* item_separator = ",",
                       const char* key_separator = ":");

// OpenAI-style tools ([{"type": "function", "function": {…}}, …], other types skipped) in the form
// of the encoder that ships with Kimi K2.5's tokenizer, which first sorts all keys, as
// nlohmann::json does.  Nothing where no function is declared, or where a schema is one that the
// reference fails on (an unresolved $ref, an enum of another type than it declares, …): the
// template then declares JSON instead.
std::optional<std::string> TypeScriptTools(const nlohmann::json& tools);

}  // namespace coppice

#endif  // COPPICE_MODEL_TOOL_DECLARATION_H_
