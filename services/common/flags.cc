#include "services/common/flags.h"

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <iostream>
#include <memory>

#include "services/common/build_info.h"
#include "services/common/logging.h"

namespace coppice {
namespace {

bool InEnvironment(const std::string& flag) {
  const char* value = std::getenv(FlagParser::EnvironmentName(flag).c_str());
  return value != nullptr && *value != '\0';
}

// CLI11 lets the file win over the environment; here it is the other way round.
class FileAfterEnvironment : public CLI::ConfigTOML {
 public:
  std::vector<CLI::ConfigItem> from_config(std::istream& input) const override {
    std::vector<CLI::ConfigItem> kept;
    for (CLI::ConfigItem& item : CLI::ConfigTOML::from_config(input)) {
      if (!InEnvironment(item.name)) kept.push_back(std::move(item));
    }
    return kept;
  }
};

std::string Article(const std::string& type_name) {
  if (type_name == "INT") return "a whole number";
  if (type_name == "UINT") return "a whole number, not negative";
  if (type_name == "FLOAT") return "a number";
  if (type_name == "BOOLEAN") return "true or false";
  return "another value";
}

std::string AfterColon(const std::string& message) {
  const size_t colon = message.find(": ");
  return colon == std::string::npos ? message : message.substr(colon + 2);
}

const CLI::Option* Find(const CLI::App& app, const std::string& flag) {
  if (const CLI::Option* found = app.get_option_no_throw(flag)) return found;
  for (const CLI::App* command : app.get_subcommands({})) {
    if (const CLI::Option* found = command->get_option_no_throw(flag)) return found;
  }
  return nullptr;
}

}  // namespace

FlagParser::FlagParser(const std::string& binary, const std::string& description)
    : binary_(binary), app_(description, binary) {
  app_.set_help_flag("-h,--help", "print this and stop");
  app_.set_version_flag("--version", VersionLine(binary), "print version and revision and stop");
  app_.config_formatter(std::make_shared<FileAfterEnvironment>());
  app_.allow_config_extras(CLI::config_extras_mode::error);
  const bool named = InEnvironment("config");
  app_.set_config("--config", named ? std::getenv("COPPICE_CONFIG") : "",
                  "a file of `flag = value` lines; flags and environment variables go before it",
                  named);
  app_.footer("Every flag is also an environment variable: --max-rows is COPPICE_MAX_ROWS.");
}

CLI::Option* FlagParser::AddSwitch(const std::string& name, bool* value, const std::string& help,
                                   CLI::App* command) {
  return Finish(name, (command ? command : &app_)->add_flag("--" + name, *value, help));
}

CLI::Option* FlagParser::AddChoice(const std::string& name, std::string* value,
                                   const std::vector<std::string>& values, const std::string& help,
                                   CLI::App* command) {
  std::string names;
  for (size_t i = 0; i < values.size(); ++i) {
    if (i > 0) names += i + 1 == values.size() ? " or " : ", ";
    names += values[i];
  }
  const CLI::Validator one_of(
      [values, names](std::string& given) -> std::string {
        for (const std::string& v : values) {
          if (given == v) return "";
        }
        return "takes " + names + ", not '" + given + "'";
      },
      "", "choice");
  return Add(name, value, help, command)->check(one_of)->type_name(names);
}

CLI::App* FlagParser::AddCommand(const std::string& name, const std::string& help) {
  CLI::App* command = app_.add_subcommand(name, help);
  command->fallthrough();  // so that --config may stand anywhere
  return command;
}

CLI::Option* FlagParser::Finish(const std::string& name, CLI::Option* option) {
  return option->envname(EnvironmentName(name));
}

std::string FlagParser::EnvironmentName(const std::string& flag) {
  std::string out = "COPPICE_";
  for (const char c : flag) {
    out += c == '-' ? '_' : static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  }
  return out;
}

std::optional<int> FlagParser::Parse(int argc, const char* const* argv) {
  // Where a refused value came from, when not from the command line.
  const auto source = [&](const std::string& flag) -> std::string {
    for (int i = 1; i < argc; ++i) {
      const std::string arg = argv[i];
      if (arg == flag || arg.rfind(flag + "=", 0) == 0) return "";
    }
    const std::string bare = flag.substr(flag.find_first_not_of('-'));
    if (InEnvironment(bare)) return " (from " + EnvironmentName(bare) + ")";
    return flag.rfind("--", 0) == 0 ? " (from the configuration file)" : "";
  };
  // The environment of a command that was not called may hold anything.
  for (CLI::App* command : app_.get_subcommands({})) {
    const bool named = std::any_of(argv + 1, argv + argc,
                                   [&](const char* arg) { return command->get_name() == arg; });
    if (named) continue;
    for (CLI::Option* option : command->get_options()) option->envname("");
  }
  try {
    app_.parse(argc, argv);
    return std::nullopt;
  } catch (const CLI::CallForHelp&) {
    std::cout << app_.help();
    return 0;
  } catch (const CLI::CallForVersion& version) {
    std::cout << version.what() << "\n";
    return 0;
  } catch (const CLI::ExtrasError& e) {
    const std::string extra = AfterColon(e.what());
    const bool no_command = !app_.get_subcommands({}).empty() && app_.get_subcommands().empty();
    error_ = (extra.rfind("-", 0) == 0 ? "unknown flag "
              : no_command             ? "unknown command "
                                       : "unexpected argument ") +
             extra;
  } catch (const CLI::ConversionError& e) {
    // "Could not convert: --flag = value", or "--flag: …"
    const std::string message = e.what();
    const size_t equals = message.find(" = ");
    if (message.rfind("Could not convert: ", 0) == 0 && equals != std::string::npos) {
      const std::string flag = AfterColon(message.substr(0, equals));
      const CLI::Option* option = Find(app_, flag);
      error_ = flag + " takes " + Article(option ? option->get_type_name() : "") + ", not '" +
               message.substr(equals + 3) + "'" + source(flag);
    } else {
      error_ = message;
    }
  } catch (const CLI::ValidationError& e) {
    const std::string message = e.what();
    const std::string flag = message.substr(0, message.find(": "));
    std::string complaint = AfterColon(message);
    if (complaint.rfind("takes ", 0) != 0) complaint = ": " + complaint;
    error_ = flag + (complaint[0] == ':' ? "" : " ") + complaint + source(flag);
  } catch (const CLI::ArgumentMismatch& e) {
    const std::string message = e.what();
    const size_t missing = message.find(" required ");
    error_ = missing != std::string::npos ? message.substr(0, message.find(": ")) + " needs a value"
                                          : message;
  } catch (const CLI::ConfigError& e) {
    const std::string message = e.what();
    const std::string prefix = "INI was not able to parse ";
    error_ = message.rfind(prefix, 0) == 0 ? "the configuration file has an unknown key '" +
                                                 message.substr(prefix.size()) + "'"
                                           : message;
  } catch (const CLI::FileError& e) {
    error_ = std::string("the configuration file ") + e.what();
  } catch (const CLI::RequiredError& e) {
    const std::string message = e.what();
    error_ = message == "A subcommand is required" ? "a command is missing" : message;
  } catch (const CLI::Error& e) {
    error_ = e.what();
  }
  std::string help = binary_;
  for (const CLI::App* command : app_.get_subcommands()) help += " " + command->get_name();
  std::cerr << binary_ << ": " << error_ << "; see " << help << " --help\n";
  return 2;
}

void ServiceFlags::AddTo(FlagParser* flags) {
  flags->Add("listen", &listen, "host:port to serve on; port 0: any free one");
  flags
      ->Add("metrics-port", &metrics_port,
            "port for Prometheus' /metrics, on the host of --listen; 0: none")
      ->check(CLI::Range(0, 65535));
  flags->AddChoice("log-level", &log_level, LogLevels(), "the least severe messages shown");
  flags->Add("drain-seconds", &drain_seconds, "how long running work may take after SIGTERM")
      ->check(CLI::Range(0, 86400));
}

}  // namespace coppice
