"""The mutation benchmark: mutants are programs that differ in one place, the same for the same seed."""

import ast

from benchmarks import mutation


def test_mutants_are_other_programs() -> None:
    drawn = mutation.sample(60, seed=1)
    assert drawn == mutation.sample(60, seed=1) != mutation.sample(60, seed=2)
    for mutant in drawn:
        source = (mutation.ROOT / mutant.file).read_bytes()
        changed = source[: mutant.start] + mutant.text.encode() + source[mutant.end :]
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(source)), mutant


def test_tests_that_reach_a_line_come_in_order() -> None:
    names = [f"tests/test_contract.py::test_a[{case}]" for case in "abcde"]
    seconds = {name: 5.0 - place for place, name in enumerate(names)} | {"tests/test_golden.py::test_b[a]": 9.0}
    reached = {"file.py": {"7": [*names, "tests/test_golden.py::test_b[a]"]}}
    mutant = mutation.Mutant("file.py", 7, (6, 8), 0, 1, "", "function")
    known = {"seconds": seconds, "reached": reached}
    assert mutation.tests_of(mutant, known) == ["tests/test_golden.py::test_b[a]", *names[:1:-1]]
    assert mutation.tests_of(mutant._replace(lines=(9, 9)), known) == []
