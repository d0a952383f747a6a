"""Plain-text documents of the demo world: one writer per category, each taking a Pen and returning the text."""

from . import functions
from . import tables as t


def capitalised(text):
    """`text` with its first letter in upper case."""
    return text[0].upper() + text[1:]


def article(noun):
    """The indefinite article for `noun`."""
    return "an" if noun[0] in "aeiou" else "a"


# ---------------------------------------------------------------------------------------------------------- facts


def country_profile(row, sentences=4):
    """The first few of four sentences about a country, always in this order."""
    name, capital, continent, language, currency = row
    return " ".join(("The capital of %s is %s." % (name, capital),
                     "%s is a country in %s." % (capitalised(name), continent),
                     "People in %s speak %s." % (name, language),
                     "The currency of %s is the %s." % (name, currency))[:sentences])


def _profiles(pen):
    sentences = pen.pick((4, 3, 2))
    return "\n".join(country_profile(row, sentences) for row in pen.run(t.COUNTRIES, pen.number(2, 6)))


def _one_fact_each(pen):
    name, capital, continent, language, currency = range(5)
    del continent
    form, column = pen.pick((("The capital of %s is %s.", capital), ("The currency of %s is the %s.", currency),
                             ("The main language of %s is %s.", language)))
    return "\n".join(form % (row[name], row[column]) for row in pen.run(t.COUNTRIES, pen.number(8, 16)))


def _fact_table(pen):
    rows = pen.run(t.COUNTRIES, pen.number(6, 12))
    return "\n".join(["country, capital, continent, language, currency"] + [", ".join(row) for row in rows])


def _elements(pen):
    style = pen.index(3)
    forms = ("The chemical symbol of {0} is {1}.", "The element with atomic number {2} is {0}.",
             "{0} has the symbol {1} and the atomic number {2}.")
    return "\n".join(capitalised(forms[style].format(*row)) for row in pen.run(t.ELEMENTS, pen.number(7, 12)))


def _animals(pen):
    out = []
    for name, kind, legs, young, sound in pen.run(t.ANIMALS, pen.number(3, 7)):
        out.append("%s %s is %s %s. It has %s legs. A young %s is called %s %s. The %s %s." % (
            capitalised(article(name)), name, article(kind), kind, legs, name, article(young), young, name, sound))
    return "\n".join(out)


def _small_facts(pen):
    kind = pen.index(3, skew=0.7)
    if kind == 0:
        return "\n".join("The opposite of %s is %s." % pair for pair in pen.run(t.OPPOSITES, pen.number(7, 14)))
    if kind == 1:
        return "\n".join("%s has %d days." % (t.MONTHS[i], t.MONTH_DAYS[i])
                         for i in pen.run(range(12), pen.number(6, 12)))
    return "\n".join("%s is the %s planet from the sun." % (t.PLANETS[i], t.ORDINALS[i]) for i in range(8))


def facts(pen):
    """Countries, elements, animals, opposites, months, planets."""
    writers = (_profiles, _one_fact_each, _fact_table, _animals, _elements, _small_facts)
    parts = [pen.pick(writers, skew=0.8)(pen) for _ in range(2 if pen.chance(0.3) else 1)]
    return "\n\n".join(parts)


# ----------------------------------------------------------------------------------------------------------- sums


def sum_of(pen, key=None):
    """One exercise and its result, as (exercise, result); `key` moves the favourite of its first number."""
    kind = pen.index(3, skew=0.8)
    if kind == 2:
        a, b = pen.number(2, 12, key, skew=0.5), pen.number(2, 12)
        return "%d * %d" % (a, b), a * b
    a = pen.number(1, 99, key, skew=0.8) if key else pen.even(1, 99)
    b = pen.number(1, 99, key="sum%d" % (a % 10), skew=0.8)
    return ("%d + %d" % (a, b), a + b) if kind == 0 else ("%d - %d" % (max(a, b), min(a, b)), abs(a - b))


def _rising_sums(pen):
    a, b, length = pen.even(1, 80), pen.even(1, 60), pen.number(10, 20)
    if pen.chance(0.75):
        return "\n".join("%d + %d = %d" % (a, b + i, a + b + i) for i in range(length))
    a += 30
    return "\n".join("%d - %d = %d" % (a + i, b, a + i - b) for i in range(length) if a + i >= b)


def _times_table(pen):
    n = pen.even(2, 12)
    return "Table of %d\n" % n + "\n".join("%d x %d = %d" % (i, n, i * n) for i in range(1, 13))


def word_problem(pen, name=None):
    """A one-step exercise in words, as (exercise, answer)."""
    name = name or pen.pick(t.FIRST_NAMES)
    goods = pen.pick(t.GOODS, key=name)
    kind = pen.index(3, key=goods, skew=1.0)
    a, b = pen.even(3, 40), pen.number(2, 20, key=name)
    if kind == 0:
        return ("%s has %d %s and buys %d more." % (name, a, goods, b),
                "%d + %d = %d, so %s now has %d %s." % (a, b, a + b, name, a + b, goods))
    if kind == 1:
        return ("%s has %d %s and gives away %d." % (name, a + b, goods, b),
                "%d - %d = %d, so %s now has %d %s." % (a + b, b, a, name, a, goods))
    a, b = pen.number(2, 12, key=name), pen.number(2, 12, key=goods)
    return ("%s has %d boxes with %d %s in each." % (name, a, b, goods),
            "%d * %d = %d, so %s has %d %s." % (a, b, a * b, name, a * b, goods))


def _exercises(pen):
    lines = ["%s = %d" % sum_of(pen)]
    for _ in range(pen.number(9, 19)):
        lines.append("%s = %d" % sum_of(pen, key=lines[-1].split()[0]))
    return "\n".join(lines)


def _problems(pen):
    names = pen.run(t.FIRST_NAMES, pen.number(3, 6))
    return "\n".join(" ".join(word_problem(pen, name)) for name in names)


def sums(pen):
    """Exercises with numbers and in words, times tables."""
    return pen.pick((_rising_sums, _problems, _exercises, _times_table), skew=0.6)(pen)


# ---------------------------------------------------------------------------------------------------------- units


def _amount(count, many, one):
    return "%d %s" % (count, one if count == 1 else many)


def conversion(pen):
    """An amount in two units, as (amount, the same amount)."""
    large, singular, small, factor = pen.pick(t.UNITS, skew=0.8)
    count = pen.number(1, 24, key=large, skew=0.8)
    return _amount(count, large, singular), "%d %s" % (count * factor, small)


def units(pen):
    """Lists of amounts in two units, counting up."""
    form = pen.pick(("%s is %s.", "%s = %s", "%s equals %s."))
    out = []
    for _ in range(pen.number(1, 3)):
        large, singular, small, factor = pen.pick(t.UNITS, skew=0.6)
        first = pen.number(1, 12)
        for count in range(first, first + pen.number(6, 12)):
            out.append(form % (_amount(count, large, singular), "%d %s" % (count * factor, small)))
    return "\n".join(out)


# --------------------------------------------------------------------------------------------------------- series


def _next_day(year, month, day):
    days = t.MONTH_DAYS[month - 1] + (1 if month == 2 and year % 4 == 0 else 0)
    if day < days:
        return year, month, day + 1
    return (year, month + 1, 1) if month < 12 else (year + 1, 1, 1)


def _dates(pen, length, spelled):
    year, month, day, weekday = pen.even(2000, 2030), pen.even(1, 12), pen.even(1, 28), pen.even(0, 6)
    out = []
    for step in range(length // 2):
        out.append("%s, %d %s %d" % (t.DAYS[(weekday + step) % 7], day, t.MONTHS[month - 1], year) if spelled
                   else "%04d-%02d-%02d" % (year, month, day))
        year, month, day = _next_day(year, month, day)
    return "\n".join(out)


def series(pen):
    """Sequences whose next element is certain: numbers, dates, times, letters, names of days."""
    kind, length = pen.even(0, 9), pen.number(20, 44, skew=0.9)
    separator = pen.pick((", ", "\n", " "))
    if kind <= 1:
        first, step = pen.even(0, 300), pen.pick((1, 2, 5, 3, 10, 4, 6, 7, 8, 9), skew=0.7)
        return "Count by %d from %d:\n" % (step, first) + separator.join(
            str(first + step * i) for i in range(length))
    if kind == 2:
        first = pen.even(40, 600)
        return "Countdown: " + ", ".join(str(first - i) for i in range(min(length, first)))
    if kind == 3:
        return separator.join(pen.run(t.DAYS, length // 2))
    if kind == 4:
        return separator.join(pen.run(t.MONTHS, length // 2))
    if kind in (5, 6):
        return _dates(pen, length, kind == 6)
    if kind == 7:
        first = pen.even(0, 70)
        return ", ".join(t.in_words(number) for number in range(first, min(first + length // 2 + 6, 100)))
    if kind == 8:
        first = pen.even(1, 9)
        return "Squares:\n" + "\n".join("%d squared is %d" % (i, i * i) for i in range(first, first + 14))
    minutes, step = pen.even(0, 23) * 60 + pen.even(0, 3) * 15, pen.pick((15, 30, 10, 5))
    times = [(minutes + step * i) % 1440 for i in range(length)]
    return "Every %d minutes:\n" % step + separator.join("%02d:%02d" % divmod(m, 60) for m in times)


# ----------------------------------------------------------------------------------------------------------- json


def to_json(value, indent=None, level=0):
    """JSON text; with `indent`, objects and lists of objects spread over lines."""
    pad = "" if indent is None else "\n" + " " * (indent * (level + 1))
    end = "" if indent is None else "\n" + " " * (indent * level)
    comma = ", " if indent is None else ","
    if isinstance(value, dict):
        return "{" + comma.join('%s"%s": %s' % (pad, key, to_json(item, indent, level + 1))
                                for key, item in value.items()) + end + "}"
    if isinstance(value, (list, tuple)):
        if any(isinstance(item, dict) for item in value):
            return "[" + comma.join(pad + to_json(item, indent, level + 1) for item in value) + end + "]"
        return "[" + ", ".join(to_json(item) for item in value) + "]"
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, (int, float)) else '"%s"' % value


def person(pen, number):
    """A record of an invented person."""
    first = pen.pick(t.FIRST_NAMES, skew=0.9)
    last = pen.pick(t.LAST_NAMES, key=first)
    country = pen.pick(t.COUNTRIES, key=last)
    return {"id": number, "name": "%s %s" % (first, last), "email": "%s.%s@example.com" % (first.lower(), last.lower()),
            "age": pen.number(20, 69, key=first), "city": country[1], "country": country[0].replace("the ", ""),
            "active": pen.chance(0.85)}


def country_record(row):
    """A country as a JSON object."""
    return dict(zip(("country", "capital", "continent", "language", "currency"), row))


def _order(pen):
    customer = pen.pick(t.FIRST_NAMES, skew=0.9)
    items, total, item = [], 0, customer
    for _ in range(pen.number(2, 4)):
        item = pen.pick(t.OBJECTS, key=item)
        quantity, price = pen.number(1, 9), pen.number(2, 12, key=item)
        total += quantity * price
        items.append({"item": item, "color": pen.pick(t.COLORS, key=item), "quantity": quantity, "price": price,
                      "total": quantity * price})
    return {"order": pen.even(100, 999), "customer": customer, "items": items, "sum": total, "paid": pen.chance(0.8)}


def _deployment(pen):
    service = pen.pick(t.SERVICES, skew=0.8)
    return {"service": service, "version": "%d.%d.%d" % (pen.number(1, 5), pen.number(0, 9, key=service),
                                                         pen.number(0, 9)),
            "replicas": pen.number(1, 9, key=service), "port": pen.pick((8080, 443, 9090, 80), key=service),
            "debug": pen.chance(0.15),
            "limits": {"cpu": pen.pick((2, 4, 8, 16, 1), key=service), "memory_mb": pen.pick((512, 1024, 2048, 4096)),
                       "timeout_s": pen.pick((30, 10, 60, 5))},
            "tags": pen.several(("web", "core", "batch", "edge", "beta"), pen.number(1, 3), key=service)}


def json(pen):
    """JSON objects: people, countries, orders, deployments."""
    kind, indent = pen.index(4, skew=0.5), pen.pick((2, None))
    if kind == 0:
        first = pen.even(1, 900)
        return to_json([person(pen, first + i) for i in range(pen.number(2, 4))], indent)
    if kind == 1:
        return "\n".join(to_json(country_record(row)) for row in pen.run(t.COUNTRIES, pen.number(4, 7)))
    return to_json(_order(pen) if kind == 2 else _deployment(pen), indent)


# ----------------------------------------------------------------------------------------------------------- code


def _module(pen):
    names = pen.several(functions.FUNCTIONS, pen.number(2, 4), key=str(pen.even(0, 40)))
    parts = [functions.write(pen, name) for name in names]
    text = "\n\n\n".join(part[0] for part in parts)
    return text + "\n\n\nprint(%s)  # %s" % parts[-1][2:] if pen.chance(0.7) else text


def _class(pen):
    name = pen.pick(("Point", "Account", "Counter", "Person", "Box", "Book", "Timer"), skew=0.7)
    fields = pen.several(("name", "size", "count", "color", "price", "owner", "weight", "title"), pen.number(2, 3),
                         key=name)
    lines = ["class %s:" % name, '    """%s %s with %s and %s."""' % (
        capitalised(article(name.lower())), name.lower(), ", ".join(fields[:-1]), fields[-1]), ""]
    lines += ["    def __init__(self, %s):" % ", ".join(fields)] + ["        self.%s = %s" % (f, f) for f in fields]
    for field in fields:
        lines += ["", "    def get_%s(self):" % field, "        return self.%s" % field]
    return "\n".join(lines)


def _test_case(pen):
    name = pen.pick(list(functions.FUNCTIONS), skew=0.6)
    lines = [functions.write(pen, name)[0], "", "",
             "class Test%s(unittest.TestCase):" % "".join(part.capitalize() for part in name.split("_"))]
    for i in range(1, pen.number(2, 4) + 1):
        _, _, call, result = functions.write(pen, name)
        lines += ["    def test_%d(self):" % i, "        self.assertEqual(%s, %s)" % (call, result), ""]
    return "\n".join(["import unittest", "", ""] + lines).rstrip()


def code(pen):
    """Python modules, classes and unit tests."""
    return pen.pick((_module, _class, _test_case), skew=0.6)(pen)


# ----------------------------------------------------------------------------------------------------------- logs


def logs(pen):
    """Log lines of one service on one host, times and request numbers rising."""
    service = pen.pick(t.SERVICES, skew=0.6)
    host = "%s-%d" % (pen.pick(("node", "web", "db"), key=service), pen.number(1, 16, key=service))
    date = "%04d-%02d-%02d" % (pen.even(2024, 2026), pen.even(1, 12), pen.even(1, 28))
    second, request, style = pen.even(0, 80000), pen.even(100, 900), pen.index(3, skew=0.7)
    user, path, out = pen.pick(t.FIRST_NAMES, skew=0.8), pen.pick(t.PATHS, key=service), []
    for _ in range(pen.number(6, 14)):
        second += pen.number(1, 9)
        request += 1
        stamp = "%sT%02d:%02d:%02dZ" % (date, second // 3600, second // 60 % 60, second % 60)
        if style == 0:
            path = pen.pick(t.PATHS, key=path)
            status = pen.pick((200, 201, 404, 500), skew=2.2)
            level = {404: "warn", 500: "error"}.get(status, "info")
            out.append("ts=%s level=%s svc=%s host=%s req=%d path=%s status=%d latency_ms=%d" % (
                stamp, level, service, host, request, path, status, pen.number(2, 60, key=path, skew=1.4)))
        elif style == 1:
            message = pen.pick(t.MESSAGES, key=user)
            user = pen.pick(t.FIRST_NAMES, key=user)
            out.append("ts=%s level=%s svc=%s host=%s msg=\"%s\" user=%s" % (
                stamp, "warn" if message == "retrying request" else "info", service, host, message, user.lower()))
        else:
            out.append("ts=%s svc=%s host=%s seq=%d cpu=%d%% mem=%d/64GiB disk=ok net=ok" % (
                stamp, service, host, request, pen.number(5, 60, key=service, skew=1.4),
                pen.number(8, 40, key=host, skew=1.6)))
    return "\n".join(out)


# ---------------------------------------------------------------------------------------------------------- story


def story(pen, hero=None, thing=None):
    """A short story about `hero` who comes across `thing`; each choice leans on the one before it."""
    hero = hero or pen.pick(t.FIRST_NAMES, skew=0.9)
    mood = pen.pick(t.MOODS, key=hero)
    home = pen.pick(t.PLACES, key=mood)
    thing = thing or pen.pick(t.OBJECTS, key=hero)
    look = pen.pick(t.ADJECTIVES, key=thing)
    where = pen.pick([place for place in t.PLACES if place != home], key=look)
    friend = pen.pick([name for name in t.FIRST_NAMES if name != hero], key=where)
    pet = pen.pick(t.PETS, key=friend)
    food = pen.pick(t.FOODS, key=pet)
    fill = {"hero": hero, "mood": mood, "home": home, "thing": thing, "look": look, "where": where, "friend": friend,
            "pet": pet, "food": food, "a_look": article(look), "A_pet": capitalised(article(pet)),
            "weather": pen.pick(t.WEATHER, key=where)}
    parts = [
        pen.pick(("{hero} was a {mood} child who lived near {home}.", "Once upon a time there was a {mood} child named "
                  "{hero}.", "Near {home} lived {hero}, who was always {mood}."), skew=1.0),
        pen.pick(("One day {hero} found {a_look} {look} {thing} in {where}.",
                  "One morning {hero} walked to {where} and saw {a_look} {look} {thing}.")),
        "{weather}" if pen.chance(0.75) else "",
        pen.pick(('"Whose {thing} is this?" asked {hero}.', "{hero} looked at the {look} {thing} for a long time."),
                 key=thing),
        pen.pick(("Then {friend} came along with a little {pet}.",
                  '{A_pet} {pet} came out of the shadows and said, "That {thing} belongs to {friend}."'), key=pet),
        pen.pick(("{hero} and {friend} shared some {food} and talked about the {thing}.",
                  "They ate {food} together and made a plan."), key=food),
        pen.pick(("The {pet} followed them back to {home}.", "On the way back to {home} they sang a song."), key=mood),
        pen.pick(("In the end {hero} gave the {look} {thing} to {friend}.",
                  "In the end {hero} kept the {look} {thing} and never forgot that day."), key=look),
        "From that day on {hero} and {friend} were best friends." if pen.chance(0.8) else "",
    ]
    return " ".join(part for part in parts if part).format(**fill)


def stories(pen):
    """One or two stories, most of them under a title."""
    hero = pen.pick(t.FIRST_NAMES, skew=0.7)
    thing = pen.pick(t.OBJECTS, key=hero)
    text = story(pen, hero, thing)
    if pen.chance(0.7):
        text = "%s and the %s\n\n%s" % (hero, capitalised(thing), text)
    return text + "\n\n" + story(pen, hero) if pen.chance(0.2) else text


# ---------------------------------------------------------------------------------------------------------- words


def _translations(pen):
    word = pen.pick(list(t.PHRASES), skew=0.4)
    languages = pen.run(t.LANGUAGES, pen.number(7, 12))
    return "How to say \"%s\":\n" % word + "\n".join("%s: %s" % (name, t.PHRASES[word][name]) for name in languages)


def _word_list(pen):
    language = pen.pick(t.LANGUAGES, skew=0.4)
    return "English - %s\n" % language + "\n".join(
        "%s - %s" % (word, t.PHRASES[word][language]) for word in pen.run(list(t.PHRASES), pen.number(8, 12)))


def _chinese(pen):
    form = pen.pick(("%s的首都是%s。", "问：%s的首都是哪里？\n答：%s。\n"))
    return "".join(form % pair for pair in pen.run(t.CHINESE_CAPITALS, pen.number(6, 14))).rstrip()


def _emoji(pen):
    form = pen.pick(("%s means %s", "%s %s"))
    return "\n".join(form % pair for pair in pen.run(t.EMOJI, pen.number(7, 16)))


def words(pen):
    """Words in other languages, Chinese sentences, names of emoji; two or three lists in a document."""
    writers = (_translations, _word_list, _chinese, _emoji)
    return "\n\n".join(pen.pick(writers, skew=0.2)(pen) for _ in range(pen.pick((2, 3), skew=0.8)))
