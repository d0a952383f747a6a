// Command lines, the same way in every binary: each flag is also an environment variable and a
// configuration key.
#ifndef COPPICE_SERVICES_COMMON_FLAGS_H_
#define COPPICE_SERVICES_COMMON_FLAGS_H_

#include <CLI/CLI.hpp>
#include <optional>
#include <string>
#include <vector>

namespace coppice {

// --max-rows N, COPPICE_MAX_ROWS=N and `max-rows = N` in the file named by --config say the same;
// the flag goes before the environment, the environment before the file.  An empty environment
// variable counts as unset.
//
//   FlagParser flags("coppice-drafter", "Drafts what may come next.");
//   flags.Add("window", &window, "positions kept")->check(CLI::Range(1, 65536));
//   if (auto code = flags.Parse(argc, argv)) return *code;
class FlagParser {
 public:
  FlagParser(const std::string& binary, const std::string& description);

  // Adds --NAME to the program, or to `command`.  The default shown is the value it has now.
  template <typename T>
  CLI::Option* Add(const std::string& name, T* value, const std::string& help,
                   CLI::App* command = nullptr) {
    CLI::App* to = command ? command : &app_;
    return Finish(name, to->add_option("--" + name, *value, help)->capture_default_str());
  }
  // A switch: present or not; true/false in the environment and the file.
  CLI::Option* AddSwitch(const std::string& name, bool* value, const std::string& help,
                         CLI::App* command = nullptr);
  // One of `values`; anything else is refused, naming them.
  CLI::Option* AddChoice(const std::string& name, std::string* value,
                         const std::vector<std::string>& values, const std::string& help,
                         CLI::App* command = nullptr);
  CLI::App* AddCommand(const std::string& name, const std::string& help);

  CLI::App& app() { return app_; }

  // Nothing when the program may go on; else its exit code: 0 after --help or --version, 2 after
  // printing one sentence on standard error that says what is wrong with the command line,
  // environment or file.
  std::optional<int> Parse(int argc, const char* const* argv);

  // The sentence of the last failed Parse.
  const std::string& error() const { return error_; }

  // "max-rows" → "COPPICE_MAX_ROWS"
  static std::string EnvironmentName(const std::string& flag);

 private:
  CLI::Option* Finish(const std::string& name, CLI::Option* option);

  std::string binary_;
  CLI::App app_;
  std::string error_;
};

// What every service takes.
struct ServiceFlags {
  std::string listen;  // the default is the service's
  int metrics_port = 0;
  std::string log_level = "info";
  int drain_seconds = 30;

  // Adds --listen, --metrics-port, --log-level and --drain-seconds.
  void AddTo(FlagParser* flags);
};

}  // namespace coppice

#endif  // COPPICE_SERVICES_COMMON_FLAGS_H_
