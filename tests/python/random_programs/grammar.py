"""Programs out of grammars: rules of templates, chosen at random."""

import linecache
import re
import textwrap

DEPTH = 3


class Grammar:
    """Rules by name, each a list of templates. In a template, `<rule>` stands for a text of that rule, drawn anew at each
    place, and `$name` for one that all places of this template share (`$x + $x.sin()`): any rule, or what `names` gives.

    A rule "leaf_<name>", if there is one, takes the place of <name> below the depth DEPTH. A `<rule>` that stands alone
    on its line may be of several lines, which are indented as it is.
    """

    def __init__(self, **rules):
        self.rules = rules

    def text(self, random, rule, names=None, depth=0):
        names = names or {}
        if rule in names:
            return random.choice(names[rule])
        leaf = "leaf_" + rule
        templates = self.rules[leaf] if depth >= DEPTH and leaf in self.rules else self.rules[rule]
        shared = {}

        def again(match):
            name = match[1]
            if name not in shared:
                shared[name] = self.text(random, name.rstrip("0123456789"), names, depth + 1)
            return shared[name]

        def anew(match):
            text = self.text(random, match[2], names, depth + 1)
            return match[1] + textwrap.indent(text, match[1]).lstrip() if match[1].strip() == "" else match[1] + text

        template = re.sub(r"\$(\w+)", again, random.choice(templates))
        return re.sub(r"(?m)(^ *|)<(\w+)>", anew, template)


def function_of(source, name, scope):
    """The function `f` that `source` defines in `scope`, with lines that tracebacks and kiln's messages can show."""
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    exec(compile(source, name, "exec"), scope)
    return scope["f"]
