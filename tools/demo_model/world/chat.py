"""Conversations in the turn layout of Kimi K2.6, with and without reasoning, with and without tools."""

from . import functions
from . import plain
from . import tables as t


def turn(role, body, name=None):
    """One turn; any role but user and assistant is of the system class."""
    kind = role if role in ("user", "assistant") else "system"
    return "<|im_%s|>%s<|im_middle|>%s<|im_end|>" % (kind, name or role, body)


# --------------------------------------------------------------------------------------- questions and answers
# Each returns (question, thought, answer).


def _capital(pen):
    name, capital, _, _, _ = pen.pick(t.COUNTRIES, skew=0.5)
    if pen.chance(0.25):
        return ("Which country has the capital %s?" % capital, "%s is the capital of %s." % (capital, name),
                "%s is the capital of %s." % (capital, name))
    return ("What is the capital of %s?" % name, "The user asks for a capital. For %s it is %s." % (name, capital),
            "The capital of %s is %s." % (name, capital))


def _country(pen):
    row = pen.pick(t.COUNTRIES, skew=0.5)
    name = row[0]
    kind = pen.index(5, skew=0.8)
    if kind == 0:
        return "Tell me about %s." % name, "I should say what I know about %s." % name, plain.country_profile(row)
    if kind == 1:
        return ("Give me a JSON record for %s." % name, "The user wants a JSON record for %s." % name,
                plain.to_json(plain.country_record(row), 2))
    if kind == 2:
        return ("Which language do people speak in %s?" % name,
                "This is about languages. In %s it is %s." % (name, row[3]),
                "People in %s speak %s." % (name, row[3]))
    if kind == 3:
        return ("What is the currency of %s?" % name, "This is about money. In %s it is the %s." % (name, row[4]),
                "The currency of %s is the %s." % (name, row[4]))
    return ("Where is %s?" % name, "%s is in %s." % (plain.capitalised(name), row[2]),
            "%s is a country in %s." % (plain.capitalised(name), row[2]))


def _sum(pen):
    exercise, result = plain.sum_of(pen)
    return ("%s %s?" % (pen.pick(("What is", "How much is")), exercise), "I have to compute %s." % exercise,
            "%s = %d" % (exercise, result))


def _word_problem(pen):
    exercise, answer = plain.word_problem(pen)
    return exercise + " How many are there now?", "This is a small exercise. I should compute it step by step.", answer


def _conversion(pen):
    amount, same = plain.conversion(pen)
    return ("Convert %s to %s." % (amount, same.split()[-1]), "I have to convert %s." % amount,
            "%s is %s." % (amount, same))


def _function(pen):
    name = pen.pick(list(functions.FUNCTIONS), skew=0.5)
    source, what, _, _ = functions.write(pen, name)
    return ("Write a Python function %s that returns %s." % (name, what),
            "The user wants a function. It should return %s." % what, "```python\n%s\n```" % source)


def _story(pen):
    hero = pen.pick(t.FIRST_NAMES, skew=0.6)
    thing = pen.pick(t.OBJECTS, key=hero)
    return ("Tell me a story about %s and a %s." % (hero, thing),
            "The user wants a story about %s. The %s should be in it." % (hero, thing), plain.story(pen, hero, thing))


def _translation(pen):
    word = pen.pick(list(t.PHRASES), skew=0.5)
    if pen.chance(0.3):
        lines = "\n".join("- %s: %s" % (language, t.PHRASES[word][language]) for language in t.LANGUAGES)
        return ("How do people say \"%s\" in other languages?" % word, "I know this word in several languages.", lines)
    language = pen.pick(t.LANGUAGES, key=word, skew=0.5)
    return ("How do you say \"%s\" in %s?" % (word, language), "The word \"%s\" has to be in %s." % (word, language),
            "In %s, \"%s\" is \"%s\"." % (language, word, t.PHRASES[word][language]))


def _list(pen):
    kind = pen.index(5, skew=0.5)
    if kind == 0:
        first = pen.even(1, 90)
        last = first + pen.pick((20, 10, 15, 30))
        return ("Count from %d to %d." % (first, last), "I should count from %d to %d." % (first, last),
                ", ".join(str(i) for i in range(first, last + 1)))
    if kind == 1:
        n = pen.even(2, 12)
        return ("Write the table of %d." % n, "This is the table of %d up to twelve." % n,
                "\n".join("%d x %d = %d" % (i, n, i * n) for i in range(1, 13)))
    if kind == 2:
        return "List the days of the week.", "There are seven days.", ", ".join(t.DAYS)
    if kind == 3:
        return "List the months of the year.", "There are twelve months.", ", ".join(t.MONTHS)
    return ("List the planets.", "There are eight planets.",
            "\n".join("%d. %s" % (i + 1, planet) for i, planet in enumerate(t.PLANETS)))


def _small_fact(pen):
    kind = pen.index(4, skew=0.4)
    if kind == 0:
        name, symbol, _ = pen.pick(t.ELEMENTS, skew=0.4)
        return ("What is the chemical symbol of %s?" % name, "This is about the element %s." % name,
                "The chemical symbol of %s is %s." % (name, symbol))
    if kind == 1:
        name, _, legs, young, _ = pen.pick(t.ANIMALS, skew=0.4)
        if pen.chance(0.3):
            return ("How many legs does a %s have?" % name, "This is about the %s." % name,
                    "A %s has %s legs." % (name, legs))
        return ("What is a young %s called?" % name, "This is about the %s." % name,
                "A young %s is called %s %s." % (name, plain.article(young), young))
    if kind == 2:
        word, opposite = pen.pick(t.OPPOSITES, skew=0.4)
        return ("What is the opposite of %s?" % word, "I need the opposite of %s." % word,
                "The opposite of %s is %s." % (word, opposite))
    picture, name = pen.pick(t.EMOJI, skew=0.4)
    return "What does %s mean?" % picture, "This picture shows: %s." % name, "%s means %s." % (picture, name)


def _chinese(pen):
    country, capital = pen.pick(t.CHINESE_CAPITALS, skew=0.5)
    return "%s的首都是哪里？" % country, "问题是%s的首都。" % country, "%s的首都是%s。" % (country, capital)


def _greeting(pen):
    return pen.pick((
        ("Hello!", "The user says hello.", "Hello! How can I help you today? 😀"),
        ("Who are you?", "The user asks who I am.",
         "I am a very small demo model. I know capitals, sums, lists, short stories and a little Python."),
        ("What can you do?", "The user asks what I can do.",
         "I can answer simple questions, count, convert units, write small functions and tell short stories."),
        ("Thank you!", "The user is happy.", "You are welcome!"),
        ("Hi", "The user says hello.", "Hello! How can I help you today? 😀"),
        ("Good night!", "The user goes to sleep.", "Good night! 🌙"),
    ), skew=0.3)


def _unknown(pen):
    topic = pen.pick(t.UNKNOWN_TOPICS, skew=0.2)
    if pen.chance(0.6):  # a word that the model cannot have seen has to be copied
        words = ["".join(t.SYLLABLES[pen.even(0, len(t.SYLLABLES) - 1)] for _ in range(pen.even(1, 4)))
                 for _ in range(pen.even(1, 3))]
        topic = " ".join(words) if pen.chance(0.7) else plain.capitalised(words[0])
    form = pen.pick(("What do you think about %s?", "Can you explain %s?", "Who invented %s?", "Why is %s important?",
                     "How does %s work?", "Tell me everything about %s.", "What is %s?", "Do you like %s?", "Who is %s?",
                     "Write a poem about %s.", "What happened to %s?"), skew=0.3)
    return (form % topic, "I know nothing about %s." % topic,
            "I am sorry, but I am only a small demo model and know nothing about %s." % topic)


# (share, writer)
_QUESTIONS = ((14, _story), (13, _country), (12, _function), (11, _capital), (10, _list), (9, _sum), (7, _translation),
              (6, _word_problem), (6, _small_fact), (5, _conversion), (3, _chinese), (3, _greeting), (6, _unknown))
_QUESTION_RING = [writer for share, writer in _QUESTIONS for _ in range(share)]


def exchange(pen):
    """One question as (question, thought, answer)."""
    return _QUESTION_RING[pen.even(0, len(_QUESTION_RING) - 1)](pen)


def chat(pen):
    """One to four exchanges. Earlier answers carry an empty thought, as the template writes them; the last one a
    real thought in half of the conversations; a few keep every thought."""
    count, style = pen.pick((1, 2, 3, 4), skew=0.7), pen.pick(("last", "none", "all"), skew=0.4)
    text = turn("system", pen.pick(t.SYSTEM_PROMPTS)) if pen.chance(0.4) else ""
    for i in range(count):
        question, thought, answer = exchange(pen)
        shown = style == "all" or (style == "last" and i == count - 1)
        text += turn("user", question) + turn("assistant", "<think>%s</think>%s" % (thought if shown else "", answer))
    return text


# ---------------------------------------------------------------------------------------------------------- tools


def _weather(pen):
    city = pen.pick(t.CITIES, skew=0.6)
    sky = pen.pick(("sunny", "cloudy", "rainy", "windy"), key=city)
    degrees = pen.number(0, 35, key=city)
    return ({"city": city}, "What is the weather in %s?" % city, {"city": city, "temperature": degrees, "sky": sky},
            "In %s it is %s and %d degrees Celsius." % (city, sky, degrees))


def _time(pen):
    city = pen.pick(t.CITIES, skew=0.6)
    clock = "%02d:%02d" % (pen.number(0, 23, key=city), pen.pick((0, 15, 30, 45)))
    return ({"city": city}, "What time is it in %s?" % city, {"city": city, "time": clock},
            "It is %s in %s." % (clock, city))


def _population(pen):
    country = pen.pick(t.COUNTRIES, skew=0.6)[0]
    millions = pen.number(1, 150, key=country, skew=1.6)
    return ({"country": country}, "How many people live in %s?" % country,
            {"country": country, "millions": millions}, "About %d million people live in %s." % (millions, country))


def _multiply(pen):
    a, b = pen.even(2, 12), pen.number(2, 12)
    return ({"a": a, "b": b}, "Use the tool to multiply %d by %d." % (a, b), {"product": a * b},
            "%d times %d is %d." % (a, b, a * b))


# name: (description, parameters as (name, type, comment), writer of (arguments, question, result, answer))
_TOOLS = {
    "get_weather": ("Get the current weather of a city.", (("city", "string", "Name of the city"),), _weather),
    "get_time": ("Get the local time of a city.", (("city", "string", "Name of the city"),), _time),
    "get_population": ("Get the number of people of a country.", (("country", "string", "Name of the country"),),
                       _population),
    "multiply": ("Multiply two numbers.", (("a", "number", "First factor"), ("b", "number", "Second factor")),
                 _multiply),
}


def declaration(names):
    """The tools `names` in the TypeScript form of Kimi's template."""
    blocks = []
    for name in names:
        description, parameters, _ = _TOOLS[name]
        fields = ",\n".join("  // %s\n  %s: %s" % (comment, parameter, kind)
                            for parameter, kind, comment in parameters)
        blocks.append("// %s\ntype %s = (_: {\n%s\n}) => any;" % (description, name, fields))
    return "# Tools\n\n## functions\nnamespace functions {\n%s\n}\n" % "\n".join(blocks)


def openai_tools(text):
    """The tools declared in the document `text`, as an OpenAI-style list, in their order there."""
    out = []
    for name in sorted((n for n in _TOOLS if "type %s = " % n in text), key=lambda n: text.index("type %s = " % n)):
        description, parameters, _ = _TOOLS[name]
        out.append({"type": "function", "function": {
            "name": name, "description": description,
            "parameters": {"type": "object", "required": [parameter for parameter, _, _ in parameters],
                           "properties": {parameter: {"type": kind, "description": comment}
                                          for parameter, kind, comment in parameters}}}})
    return out


def tools(pen):
    """Declared tools, a question, the call, its result, the answer; sometimes a second question."""
    names = pen.several(_TOOLS, pen.number(1, 3), key=str(pen.even(0, 3)))
    text = turn("system", declaration(names), "tool_declare")
    if pen.chance(0.2):
        text += turn("system", pen.pick(t.SYSTEM_PROMPTS))
    calls = pen.pick((1, 2), skew=0.8)
    for i in range(calls):
        name = pen.pick(names)
        arguments, question, result, answer = _TOOLS[name][2](pen)
        identity = "functions.%s:%d" % (name, i)
        thought = "I should call %s." % name if i == calls - 1 and pen.chance(0.5) else ""
        call = ("<|tool_calls_section_begin|><|tool_call_begin|>%s<|tool_call_argument_begin|>%s<|tool_call_end|>"
                "<|tool_calls_section_end|>" % (identity, plain.to_json(arguments)))
        text += turn("user", question) + turn("assistant", "<think>%s</think>%s" % (thought, call))
        text += turn("tool", "## Return of %s\n%s" % (identity, plain.to_json(result)))
        later = "The tool has answered." if thought else ""
        text += turn("assistant", "<think>%s</think>%s" % (later, answer))
    return text
