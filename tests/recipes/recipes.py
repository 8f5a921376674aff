#!/usr/bin/env python3
"""Reads recipes out of Markdown pages: the commands that a person pastes are the ones that the tests run.

    recipes.py PAGE          lists the recipes of a page
    recipes.py PAGE NAME     prints the commands of one recipe as a script

A block belongs to a recipe if an HTML comment stands on the line above its fence:

    <!-- recipe: NAME -->                commands, in the order of the page
    <!-- recipe: NAME, file: PATH -->    the block is the content of this file
    <!-- recipe: NAME, text -->          neither: an excerpt of a larger file, which a test validates
    <!-- not run: REASON -->             an example that no test runs, and why

`check` fails for a block of commands that has neither mark.
"""

import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

MARK = re.compile(r"\s*<!-- (recipe|not run): (.*?) -->\s*$")
FENCE = re.compile(r"(\s*)```(\w*)\s*$")


@dataclass(frozen=True)
class Block:
    """A fenced block. `file` is the path of the file that it is the content of, if it is marked as one."""

    line: int
    language: str
    text: str
    recipe: str = ""
    file: str = ""
    is_text: bool = False
    not_run: str = ""


class RecipeError(Exception):
    """A page or a recipe that cannot be read."""


def blocks(page):
    """Every fenced block of a page, in order."""
    found, fence, mark, body, begun = [], None, None, [], 0
    for number, line in enumerate(Path(page).read_text().splitlines(), 1):
        match = FENCE.match(line)
        if fence is None and match:
            fence, body, begun = match, [], number
        elif fence is not None and line.strip() == "```":
            indent = len(fence[1])
            text = "".join(f"{row[min(indent, len(row) - len(row.lstrip())):]}\n" for row in body)
            found.append(_block(page, begun, fence[2], text, mark))
            fence = mark = None
        elif fence is not None:
            body.append(line)
        else:
            mark = MARK.match(line)
    if fence is not None:
        raise RecipeError(f"{page}:{begun}: the block has no end")
    return found


def _block(page, line, language, text, mark):
    if mark is None:
        return Block(line, language, text)
    if mark[1] == "not run":
        return Block(line, language, text, not_run=mark[2])
    name, *options = (part.strip() for part in mark[2].split(","))
    file, is_text = "", False
    for option in options:
        if option.startswith("file: "):
            file = option.removeprefix("file: ")
        elif option == "text":
            is_text = True
        else:
            raise RecipeError(f"{page}:{line}: unknown option {option!r}")
    if language != "sh" and not file and not is_text:
        raise RecipeError(f"{page}:{line}: recipe {name}: a block that is not sh needs `file: PATH` or `text`")
    return Block(line, language, text, recipe=name, file=file, is_text=is_text)


def recipes(page):
    """The blocks of each recipe of a page, by its name."""
    found = {}
    for block in blocks(page):
        if block.recipe:
            found.setdefault(block.recipe, []).append(block)
    return found


def recipe(page, name):
    """The blocks of one recipe."""
    found = recipes(page)
    if name not in found:
        raise RecipeError(f"{page}: no recipe {name!r}; it has {', '.join(found) or 'none'}")
    return found[name]


def text(page, name):
    """The only block of a recipe that is marked `text`."""
    found = [block.text for block in recipe(page, name) if block.is_text]
    if len(found) != 1:
        raise RecipeError(f"{page}: recipe {name} has {len(found)} blocks of text")
    return found[0]


def script(page, name, replacements=None):
    """The commands of a recipe. `replacements` maps words of the page, such as example addresses, to others."""
    lines = []
    for block in recipe(page, name):
        if block.is_text:
            continue
        lines.append(f"# {page}:{block.line}")
        if block.file:
            directory = shlex.quote(str(Path(block.file).parent))
            lines += [f"mkdir -p {directory}", f"cat >{shlex.quote(block.file)} <<'RECIPE_END'", block.text.rstrip("\n"), "RECIPE_END"]
        else:
            lines.append(block.text.rstrip("\n"))
    if not lines:
        raise RecipeError(f"{page}: recipe {name} has no commands")
    return replace("\n".join(lines) + "\n", replacements or {})


def replace(value, replacements):
    """Replaces whole words: `10.0.0.1` is no part of `10.0.0.11`."""
    if not replacements:
        return value
    words = "|".join(re.escape(word) for word in sorted(replacements, key=len, reverse=True))
    return re.sub(rf"(?<![\w.])(?:{words})(?![\w]|\.\d)", lambda match: replacements[match[0]], value)


def check(page):
    """What is wrong with a page: blocks of commands without a mark, and marks without a block."""
    found = [f"{page}:{block.line}: commands without `recipe: NAME` or `not run: REASON`"
             for block in blocks(page) if block.language in ("sh", "bash") and not block.recipe and not block.not_run]
    marked = sum(bool(MARK.match(line)) for line in Path(page).read_text().splitlines())
    used = sum(bool(block.recipe or block.not_run) for block in blocks(page))
    if marked != used:
        found.append(f"{page}: {marked} marks, but {used} marked blocks: a mark must stand on the line above the fence")
    return found


def main(arguments):
    if len(arguments) == 1:
        for name, found in recipes(arguments[0]).items():
            print(name, *(f"line {block.line}" + (f" ({block.file})" if block.file else "") for block in found), sep="\t")
    elif len(arguments) == 2:
        print(script(*arguments), end="")
    else:
        print(__doc__, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except (RecipeError, OSError) as failure:
        print(f"recipes: {failure}", file=sys.stderr)
        sys.exit(1)
