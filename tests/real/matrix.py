"""What is tested with which settings: tests name them (`covers`), and the table in tests/README.md is written from that."""

from readme import check_table


def covers(*settings):
    """Names the settings of Kubernetes with which a test, or each test of a class, runs."""
    def mark(test):
        test.covers = settings
        return test
    return mark


def table(tests):
    """The settings, and the tests or classes that name them. `strict` are those with a long form only."""
    rows = {}
    for test in tests:
        method, case = getattr(test, test._testMethodName), type(test)
        long_case = hasattr(case, "long_form")
        for part, name, strict in ((method, test.id(), long_case or hasattr(method, "long_form")), (case, test.id().rpartition(".")[0], long_case)):
            for setting in getattr(part, "covers", ()):
                rows.setdefault(setting, {})[f"`{name}`" + " (strict)" * strict] = True
    lines = [f"| {setting} | {', '.join(names)} |\n" for setting, names in sorted(rows.items(), key=lambda row: row[0].strip("`-").lower())]
    return "| setting | tests |\n|---|---|\n" + "".join(lines)


def check(tests):
    check_table("settings", table(tests))
