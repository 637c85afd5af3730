"""The rules at the border to files, each with the test that shows it."""

from __future__ import annotations

from dqnfed.experiments.border_rules import Rule

FUZZ, DAMAGE, COMMANDS = "tests/fuzz", "tests/unit/sim/test_damage.py", "tests/end_to_end/test_files.py"
KILLS, FEDERATION = "tests/end_to_end/test_kill_resume.py", "tests/unit/core/test_federation.py"
OWN, FETCH, ENGINE = (
    "tests/unit/experiments/test_own_data.py",
    "tests/unit/data/test_fetch.py",
    "tests/unit/sim/test_engine.py",
)


def _files(rule: str, default: str, setting: str, test: str) -> Rule:
    return Rule("Files", rule, default, setting, test)


RULES = (
    _files(
        "A number of a table is finite, at most 1e30 in size, and at most 1e8 times as far from its column's median as "
        "is usual (the median of the distances that are not zero)",
        "refused with row and column",
        '`data.extremes = "missing"`: taken for missing, and said',
        f"{OWN}::test_an_infinite_or_absurd_cell_is_refused_with_row_and_column",
    ),
    _files(
        "Numbers of a table are written as 1234.5: a column of them with decimal commas, separated thousands or units "
        "is no column of categories",
        "refused with row and column",
        "",
        f"{OWN}::test_numbers_in_another_notation_are_refused",
    ),
    _files(
        "Numbers of arrays in Python are finite and at most 1e18 in size",
        "refused with client, row and column",
        "",
        f"{FEDERATION}::test_numbers_that_are_not_finite_are_refused_with_their_place",
    ),
    _files(
        "Whole-number class labels are 0, 1, ...",
        "refused when the federation is built, with the way out",
        "",
        f"{FEDERATION}::test_class_labels_below_zero_are_refused_with_the_way_out",
    ),
    _files(
        "A client too small to be tested is kept for training",
        "said in the terminal and the log; it has no score",
        "",
        f"{FEDERATION}::test_a_client_too_small_to_be_tested_trains_and_is_said_so",
    ),
    _files(
        "A run goes on with the data it was started with",
        "other data are refused, and what differs is named",
        "",
        f"{COMMANDS}::test_a_replaced_table_is_refused_at_resume",
    ),
    _files(
        "A run goes on with the computations it was started with (`NUMERICS`)",
        "another number is refused",
        "",
        f"{DAMAGE}::test_other_numerics_are_refused",
    ),
    _files(
        "`NUMERICS` is raised when results change",
        "stored results of every method are compared within 1e-8",
        "",
        "tests/unit/sim/test_numerics.py::test_results_have_not_changed",
    ),
    _files(
        "Every file of a run and of its checkpoints has a checksum (SHA-256)",
        "`resume` names each damaged file and goes on from the newest intact checkpoint",
        "",
        f"{DAMAGE}::test_a_flipped_bit_is_named_or_harmless",
    ),
    _files("Cut or missing files are named", "as above", "", f"{DAMAGE}::test_a_cut_or_missing_file_is_named"),
    _files(
        "Two checkpoints are kept",
        "the second is used where the first is damaged",
        "`run.checkpoint_seconds`: how often",
        f"{DAMAGE}::test_the_newest_intact_checkpoint_is_used",
    ),
    _files(
        "A finished run with a damaged file is neither read nor exported",
        "refused; `resume` mends it",
        "",
        f"{COMMANDS}::test_resume_names_what_is_damaged_and_mends_it",
    ),
    _files(
        "No table, figure or statement is made of a damaged run; a report's page names its damaged files",
        "refused",
        "",
        f"{COMMANDS}::test_no_table_and_no_statement_is_made_of_a_damaged_run",
    ),
    _files(
        "A kill at any moment, between any two files too, loses nothing",
        "the resumed run has the same bits",
        "",
        f"{KILLS}::test_killed_between_any_two_files",
    ),
    _files(
        "A run folder works from any directory",
        "paths of data are stored as absolute ones; a data folder that has moved is looked for at $DQNFED_DATA",
        "",
        f"{COMMANDS}::test_a_run_works_from_any_directory",
    ),
    _files(
        "`predict` takes finite numbers only",
        "refused with row and column",
        "",
        f"{COMMANDS}::test_predict_refuses_what_is_not_finite",
    ),
    _files(
        "`predict` takes a model of finite weights only",
        "refused",
        "",
        f"{COMMANDS}::test_predict_refuses_a_model_of_nan",
    ),
    _files(
        "A run whose mean training loss is not finite at the end, or above twice its start, is `diverged`",
        "`run` and `resume` exit with 3; `compare`, `sweep` and the report mark the row",
        "",
        f"{COMMANDS}::test_a_diverged_run_says_so_and_exits_with_3",
    ),
    _files(
        "A folder that holds a run is not overwritten, in Python neither",
        "refused",
        "`resume=True` goes on",
        f"{DAMAGE}::test_a_finished_run_is_never_overwritten",
    ),
    _files(
        "A dataset that was asked for and is missing is an error",
        "refused, with the command that fetches it",
        "",
        f"{COMMANDS}::test_a_dataset_that_is_missing_is_an_error",
    ),
    _files(
        "Datasets are fetched over https, and their checksum is that of the catalogue",
        "other bytes are thrown away; where none is published, the first fetch records it and says so",
        "",
        f"{FETCH}::test_every_download_is_https_and_has_a_checksum_or_records_one",
    ),
    _files("`rounds` is a whole number >= 1", "refused", "", f"{ENGINE}::test_rounds_is_a_whole_number"),
    _files(
        "Names stay inside `runs/`",
        "other characters become -",
        "`--out`",
        f"{COMMANDS}::test_names_stay_inside_runs",
    ),
    _files("`env.json` keeps no passwords", "*** in their place", "", f"{DAMAGE}::test_no_password_is_kept"),
    _files("Configs of any shape", "used or refused in words", "", f"{FUZZ}/test_configs.py::test_odd_values"),
    _files("Tables with any cells, and damaged ones", "as above", "", f"{FUZZ}/test_tables.py::test_odd_tables"),
    _files("Damaged files of every reader", "as above", "", f"{FUZZ}/test_readers.py::test_damaged_datasets"),
    _files("Python calls with any arguments", "as above", "", f"{FUZZ}/test_calls.py::test_odd_calls"),
)  # fmt: skip
