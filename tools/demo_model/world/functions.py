"""Small Python functions for the code documents: source with parameter names left open, and calls with results."""

# name: (parameters, what it returns, body lines, function of example numbers -> (arguments, result))
# {0}, {1}, {2} stand for the parameter names.
FUNCTIONS = {
    "add": (2, "the sum of {0} and {1}", ["return {0} + {1}"], lambda a, b: ((a, b), a + b)),
    "subtract": (2, "the difference of {0} and {1}", ["return {0} - {1}"], lambda a, b: ((a + b, b), a)),
    "multiply": (2, "the product of {0} and {1}", ["return {0} * {1}"], lambda a, b: ((a, b), a * b)),
    "square": (1, "the square of {0}", ["return {0} * {0}"], lambda a, b: ((a,), a * a)),
    "double": (1, "twice {0}", ["return 2 * {0}"], lambda a, b: ((a,), 2 * a)),
    "is_even": (1, "True if {0} is even", ["return {0} % 2 == 0"], lambda a, b: ((a,), a % 2 == 0)),
    "is_odd": (1, "True if {0} is odd", ["return {0} % 2 == 1"], lambda a, b: ((a,), a % 2 == 1)),
    "maximum": (2, "the larger of {0} and {1}", ["if {0} > {1}:", "    return {0}", "return {1}"],
                lambda a, b: ((a, b), max(a, b))),
    "minimum": (2, "the smaller of {0} and {1}", ["if {0} < {1}:", "    return {0}", "return {1}"],
                lambda a, b: ((a, b), min(a, b))),
    "absolute": (1, "the absolute value of {0}", ["if {0} < 0:", "    return -{0}", "return {0}"],
                 lambda a, b: ((-a,), a)),
    "factorial": (1, "the factorial of {0}",
                  ["result = 1", "for i in range(2, {0} + 1):", "    result *= i", "return result"],
                  lambda a, b: ((a % 7,), (1, 1, 2, 6, 24, 120, 720)[a % 7])),
    "fibonacci": (1, "the Fibonacci number with index {0}",
                  ["a, b = 0, 1", "for _ in range({0}):", "    a, b = b, a + b", "return a"],
                  lambda a, b: ((a % 10,), (0, 1, 1, 2, 3, 5, 8, 13, 21, 34)[a % 10])),
    "power": (2, "{0} to the power of {1}",
              ["result = 1", "for _ in range({1}):", "    result *= {0}", "return result"],
              lambda a, b: ((a % 6, b % 4), (a % 6) ** (b % 4))),
    "gcd": (2, "the greatest common divisor of {0} and {1}",
            ["while {1}:", "    {0}, {1} = {1}, {0} % {1}", "return {0}"],
            lambda a, b: ((a * 3, 3), 3)),
    "clamp": (3, "{0} limited to the range from {1} to {2}",
              ["if {0} < {1}:", "    return {1}", "if {0} > {2}:", "    return {2}", "return {0}"],
              lambda a, b: ((a + 20, 0, 10), 10)),
    "mean": (1, "the mean of the list {0}", ["return sum({0}) / len({0})"],
             lambda a, b: (([a, a + 2],), float(a + 1))),
    "last": (1, "the last item of the list {0}", ["return {0}[-1]"], lambda a, b: (([a, b],), b)),
    "reverse": (1, "the text {0} read backwards", ["return {0}[::-1]"], lambda a, b: (("abc",), "cba")),
    "count_vowels": (1, "the number of vowels in the text {0}",
                     ["count = 0", "for letter in {0}:", "    if letter in \"aeiou\":", "        count += 1",
                      "return count"],
                     lambda a, b: (("banana",), 3)),
    "is_palindrome": (1, "True if the text {0} reads the same backwards", ["return {0} == {0}[::-1]"],
                      lambda a, b: (("level",), True)),
    "total": (1, "the sum of the list {0}",
              ["result = 0", "for item in {0}:", "    result += item", "return result"],
              lambda a, b: (([a, b],), a + b)),
    "to_minutes": (1, "the number of minutes in {0} hours", ["return {0} * 60"], lambda a, b: ((a,), 60 * a)),
}

# Parameter names, the most usual ones first; chosen by what the function works on.
_NUMBERS = (("a", "b", "c"), ("x", "y", "z"), ("n", "m", "k"), ("left", "right", "middle"))
_LISTS = (("items",), ("values",), ("numbers",))
_TEXTS = (("text",), ("word",), ("s",))
_ONE = (("n",), ("x",), ("number",), ("value",))


def _parameter_sets(name):
    count, returns, _, _ = FUNCTIONS[name]
    if "the list" in returns:
        return _LISTS
    if "the text" in returns:
        return _TEXTS
    return _ONE if count == 1 else _NUMBERS


def write(pen, name):
    """Source of the function `name`, a call of it and that call's result, as (source, what, call, result)."""
    count, returns, body, example = FUNCTIONS[name]
    names = pen.pick(_parameter_sets(name), skew=1.6)[:count]
    what = returns.format(*names)
    arguments, result = example(pen.number(2, 12, key=name), pen.number(2, 12, key=names[0]))
    call = "%s(%s)" % (name, ", ".join(repr(argument) for argument in arguments))
    lines = ["def %s(%s):" % (name, ", ".join(names))]
    if pen.chance(0.3):
        lines += ['    """Return %s.' % what, "", "    >>> " + call, "    %r" % (result,), '    """']
    else:
        lines.append('    """Return %s."""' % what)
    lines += ["    " + line.format(*names) for line in body]
    return "\n".join(lines), what, call, repr(result)
