"""Records to rows: what each cell becomes, and which one is named when it cannot."""

import json
import math
from collections.abc import Callable
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from eagleray.actors.data.recipe import Task
from eagleray.actors.data.records import Bad
from eagleray.actors.data.row_schema import Row, RowColumn, RowSchema, find_schema
from eagleray.actors.data.sources import find_files
from eagleray.platform.config import DataConfig
from eagleray.platform.errors import DataError

NUMBER, CATEGORY = RowColumn("x", 1, False), RowColumn("c", 1, True)
VECTOR, LABEL = RowColumn("v", 3, False), RowColumn("y", 1, False, is_label=True)
Find = Callable[..., RowSchema]


def schema(*columns: RowColumn, missing: Any = "fail") -> RowSchema:
    return RowSchema(columns, missing)


@pytest.mark.parametrize(
    ("cell", "value"),
    [
        (3, 3.0), (-0.5, -0.5), ("7", 7.0), (" 1e3 ", 1000.0), (True, 1.0), (Decimal("2.5"), 2.5),
        (np.float32(1.5), 1.5), (3.4028234663852886e38, 3.4028234663852886e38), ([4], 4.0),
    ],
)  # fmt: skip
def test_numbers_of_any_spelling_are_numbers(cell: Any, value: float) -> None:
    assert schema(NUMBER).row({"x": cell}) == Row([value], [])


@pytest.mark.parametrize("cell", [None, "", "  ", "NA", " na ", "NaN", "nan", math.nan])
def test_an_empty_cell_is_what_the_settings_say(cell: Any) -> None:
    bad = schema(NUMBER).row({"x": cell})
    assert isinstance(bad, Bad)
    assert bad.reason == "has an empty cell in column 'x'"
    assert "data.features.missing" in bad.fix
    assert schema(NUMBER, missing=-1.0).row({"x": cell}) == Row([-1.0], [])
    (value,) = schema(NUMBER, missing="nan").row({"x": cell}).values  # type: ignore[union-attr]
    assert math.isnan(value)


def test_a_field_that_is_not_there_is_empty_and_said_so() -> None:
    assert schema(NUMBER).row({"z": 1}).reason == "has no field 'x'"  # type: ignore[union-attr]
    assert schema(NUMBER, missing=0.0).row({"z": 1}) == Row([0.0], [])


@pytest.mark.parametrize(
    ("cell", "reason"),
    [
        ("UA", "'UA' in column 'x', not a number"),
        ("x" * 99, f"'{'x' * 36}... in column 'x', not a number"),
        ({"a": 1}, "a dict in column 'x', not a number"),
        (datetime(2013, 1, 1), "a datetime in column 'x', not a number"),
        ([[1]], "a list in column 'x', not a number"),
        (math.inf, "inf in column 'x', which float32 cannot hold"),
        ("-inf", "'-inf' in column 'x', which float32 cannot hold"),
        (3.5e38, "3.5e+38 in column 'x', which float32 cannot hold"),
        (10**400, f"1{'0' * 36}... in column 'x', which float32 cannot hold"),
        ([1, 2], "a list of 2 in column 'x', and the first record has one"),
        ([], "a list of 0 in column 'x', and the first record has one"),
    ],
)
def test_what_is_no_number_is_named_by_column_and_value(cell: Any, reason: str) -> None:
    for missing in ("fail", 0.0):
        bad = schema(NUMBER, missing=missing).row({"x": cell})
        assert isinstance(bad, Bad)
        assert bad.reason.startswith(f"has {reason}")


@pytest.mark.parametrize(
    ("cell", "word"),
    [
        ("UA", "UA"), (" UA", " UA"), ("NA", "NA"), ("\u00e9", "\u00e9"), (7, "7"), (7.0, "7"),
        (-3, "-3"), (True, "true"), (False, "false"),
    ],
)  # fmt: skip
def test_names_and_whole_numbers_are_categories(cell: Any, word: str) -> None:
    assert schema(CATEGORY).row({"c": cell}) == Row([0.0], [word])


@pytest.mark.parametrize("cell", [None, "", " ", math.nan])
def test_an_empty_category_is_a_name_of_its_own_unless_it_is_bad(cell: Any) -> None:
    assert schema(CATEGORY, missing="nan").row({"c": cell}) == Row([0.0], [""])
    assert schema(CATEGORY, missing=5.0).row({"c": cell}) == Row([0.0], [""])
    assert isinstance(schema(CATEGORY).row({"c": cell}), Bad)


@pytest.mark.parametrize("cell", [1.5, ["a"], {"a": 1}, "\ud800"])
def test_what_is_no_name_is_named(cell: Any) -> None:
    bad = schema(CATEGORY).row({"c": cell})
    assert isinstance(bad, Bad)
    assert "in category 'c'" in bad.reason


@pytest.mark.parametrize("missing", ["fail", "nan", 0.0])
def test_a_record_without_its_label_is_bad_in_any_case(missing: Any) -> None:
    for label in (LABEL, RowColumn("y", 1, True, is_label=True)):
        bad = schema(NUMBER, label, missing=missing).row({"x": 1, "y": None})
        assert bad == Bad("has an empty cell in column 'y'")


def test_a_vector_has_one_length_and_its_empty_places_are_cells() -> None:
    assert schema(VECTOR).row({"v": [1, 2.5, "3"]}) == Row([1.0, 2.5, 3.0], [])
    for cell, given in (([1, 2], "a list of 2"), (7, "one value"), ("123", "one value")):
        bad = schema(VECTOR).row({"v": cell})
        assert bad == Bad(f"has {given} in column 'v', and the first record has 3 values")
    assert schema(VECTOR, missing=0.0).row({"v": None}) == Row([0.0] * 3, [])
    assert schema(VECTOR, missing=0.0).row({"v": [1, None, 2]}) == Row([1.0, 0.0, 2.0], [])
    assert isinstance(schema(VECTOR).row({"v": [1, None, 2]}), Bad)


def test_values_whose_sum_is_too_large_are_fine_one_by_one() -> None:
    cells = [3e38, 3e38, -3e38]
    assert schema(VECTOR).row({"v": cells}) == Row(cells, [])


@pytest.fixture
def find(tmp_path: Path) -> Find:
    def run(*sources: dict[str, Any], **features: Any) -> RowSchema:
        config = DataConfig.model_validate({"sources": sources, "features": features})

        def resolve(path: str) -> Path:
            return tmp_path / path

        return find_schema(Task(config, resolve, find_files(config.sources, resolve), 0, print))

    return run


def lines(path: Path, *records: Any) -> dict[str, Any]:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return {"path": path.name}


def test_without_columns_all_but_the_label_and_conditions_are_features(
    find: Find, tmp_path: Path
) -> None:
    source = lines(tmp_path / "a.jsonl", {"b": 1, "year": 3, "a": [1, 2], "c": "x", "y": 0})
    found = find(source | {"where": {"year": [3]}}, label="y", categories=["c"])
    assert found.columns == (
        RowColumn("b", 1, False),
        RowColumn("a", 2, False),
        RowColumn("c", 1, True),
        RowColumn("y", 1, False, is_label=True),
    )
    assert found.row_values == 5
    assert found.category_places == [(3, RowColumn("c", 1, True))]
    assert isinstance(found.row({"b": 1, "year": 3, "a": [1, 2], "c": "x", "y": 0}), Row)


def test_the_first_record_that_has_a_value_says_how_long_it_is(find: Find, tmp_path: Path) -> None:
    source = lines(tmp_path / "a.jsonl", 7, {"v": None}, {"v": []}, {"x": 1}, {"v": [1, 2]})
    found = find(source, columns=["v", "never"], missing="nan")
    assert [(column.name, column.width) for column in found.columns] == [("v", 2), ("never", 1)]


def test_a_field_that_no_record_had_before_is_bad_where_columns_were_not_named(
    find: Find, tmp_path: Path
) -> None:
    source = lines(tmp_path / "a.jsonl", {"a": 1})
    bad = find(source).row({"a": 1, "b": 2})
    assert isinstance(bad, Bad)
    assert bad.reason == "has a field 'b', as no record before it"
    assert find(source, columns=["a"]).row({"a": 1, "b": 2}) == Row([1.0], [])


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_tables_with_other_columns_are_refused_where_columns_were_not_named(
    find: Find, tmp_path: Path, kind: str
) -> None:
    for name, record in (("a", {"x": 1, "y": 2}), ("b", {"y": 2, "x": 1, "z": 3})):
        if kind == "csv":
            text = ",".join(record) + "\n" + ",".join(map(str, record.values())) + "\n"
            (tmp_path / f"{name}.csv").write_text(text)
        else:
            pq.write_table(pa.Table.from_pylist([record]), tmp_path / f"{name}.parquet")
    source = {"path": f"*.{kind}", "kind": kind}
    with pytest.raises(DataError, match=r"different columns: only one of them has 'z'") as failed:
        find(source)
    assert "data.features.columns" in failed.value.fix
    assert find(source, columns=["x"]).columns == (NUMBER,)


@pytest.mark.parametrize(
    ("features", "named"),
    [
        ({"label": "z"}, r"'z' is no column of .*a\.jsonl \(it has 'x', 'v'\)"),
        ({"categories": ["z"]}, "'z' is no column"),
        ({"label": "v"}, "label 'v' holds a list of 2, not one value"),
        ({"columns": ["x"], "label": "v"}, "label 'v' holds a list of 2"),
    ],
)
def test_names_that_do_not_fit_the_records_are_refused(
    find: Find, tmp_path: Path, features: dict[str, Any], named: str
) -> None:
    with pytest.raises(DataError, match=named):
        find(lines(tmp_path / "a.jsonl", {"x": 1, "v": [1, 2]}), **features)


def test_a_record_with_nothing_but_its_label_has_no_feature(find: Find, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no column that could be a feature"):
        find(lines(tmp_path / "a.jsonl", {"x": 1}), label="x")


def test_rows_that_are_too_long_are_refused(find: Find, tmp_path: Path) -> None:
    source = lines(tmp_path / "a.jsonl", {"v": [0] * 65_536, "w": 1})
    with pytest.raises(DataError, match="65537 values in a row; at most 65536"):
        find(source)


def test_files_without_a_record_are_refused_by_path(find: Find, tmp_path: Path) -> None:
    source = lines(tmp_path / "a.jsonl", {"x": 1}) | {"where": {"x": [2]}}
    with pytest.raises(DataError, match=r"no record in 1 files of a\.jsonl: 0 empty, 1 filtered"):
        find(source)


def test_a_table_that_lacks_a_column_is_named(find: Find, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x,y\n1,2\n")
    with pytest.raises(DataError, match=r"a\.csv has no column 'z'") as failed:
        find({"path": "a.csv", "kind": "csv"}, columns=["x", "z"])
    assert failed.value.fix.startswith("set data.features and `where`")


@pytest.mark.parametrize("columns", [None, ["x"]])
def test_two_columns_of_one_name_are_refused(
    find: Find, tmp_path: Path, columns: list[str] | None
) -> None:
    (tmp_path / "a.csv").write_text("x,y,x\n1,2,3\n")
    source = {"path": "a.csv", "kind": "csv"}
    with pytest.raises(DataError, match=r"a\.csv has 2 columns 'x'"):
        find(source, columns=columns)
    assert find(source, columns=["y"]).columns == (RowColumn("y", 1, False),)
