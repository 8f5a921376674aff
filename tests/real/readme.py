"""Tables of tests/README.md that tests write."""

import os

from rig import REPOSITORY

README = REPOSITORY / "tests/README.md"
WRITE = bool(os.environ.get("JACKSTAY_WRITE_README"))


def table_of(name):
    """The text between the markers of a table."""
    _, _, rest = README.read_text().partition(f"<!-- {name}: begin -->\n")
    text, marker, _ = rest.partition(f"<!-- {name}: end -->")
    if not marker:
        raise SystemExit(f"{README}: the markers of the table {name} are missing")
    return text


def check_table(name, table):
    """Compares a table with the README, or writes it with JACKSTAY_WRITE_README."""
    written = table_of(name)
    if WRITE:
        begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
        README.write_text(README.read_text().replace(f"{begin}{written}{end}", f"{begin}{table}{end}"))
    elif written != table:
        raise AssertionError(f"the table {name} of tests/README.md differs; JACKSTAY_WRITE_README=1 writes it. Expected:\n{table}")


def write_rows(name, head, rows):
    """With JACKSTAY_WRITE_README, replaces or appends the rows, lists of cells, of a table with measured times. Rows are
    known by their first cell."""
    if WRITE:
        lines = {line.split(" | ")[0].lstrip("| "): line + "\n" for line in table_of(name).splitlines()[2:]}
        lines.update({cells[0]: f"| {' | '.join(cells)} |\n" for cells in rows})
        check_table(name, head + "".join(lines.values()))
