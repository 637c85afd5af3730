"""The rules of the border to clients, for the table of borders: what is believed of a reply, and what is not."""

from __future__ import annotations

from dqnfed.experiments.border_rules import Rule

CLIENTS = "clients"
CHECKS, ATTACKS = "tests/unit/flower/test_checks.py", "tests/unit/flower/test_attacks.py"
SCREENING, CONSISTENCY = "tests/unit/core/test_screening.py", "tests/unit/core/test_consistency.py"
TRUST, FAULTS, FUZZ = "tests/unit/core/test_trust.py", "tests/unit/flower/test_faults.py", "tests/fuzz/test_replies.py"
SKETCHES, GUARD = "tests/unit/core/test_sketches.py", "tests/unit/sim/test_guard.py"
STEP_LENGTH = "tests/unit/maths/test_step_length.py"
DIRECTIONS, COMMON_STEPS = "tests/unit/maths/test_bounded_rates.py", "tests/unit/maths/test_common_steps.py"
VOTES = "tests/unit/algorithms/parts/test_votes.py"

STATISTICS = "tests/unit/data/test_statistics.py"

RULES = (
    Rule(
        CLIENTS,
        "a training reply has the kind, names, types and shapes that the server's own model and method give",
        "always",
        "",
        f"{CHECKS}::test_another_layout_is_refused",
    ),
    Rule(
        CLIENTS,
        "these are found without any client's help, also with two clients",
        "always",
        "",
        f"{CHECKS}::test_with_two_clients_the_servers_model_decides_not_a_vote",
    ),
    Rule(
        CLIENTS,
        "losses are at or above the floor",
        "0",
        "`Problem.loss_floor`",
        f"{CHECKS}::test_a_training_loss_below_the_floor_is_refused",
    ),
    Rule(
        CLIENTS,
        "a reply with NaN or inf is left out; NaN is allowed where it means not known",
        "drop",
        "`policy.on_nonfinite`",
        f"{FAULTS}::test_a_client_at_fault_counts_as_absent",
    ),
    Rule(
        CLIENTS,
        "an evaluation has finite losses, scores within the score's range, one a model; else it is not counted",
        "always",
        "",
        f"{CHECKS}::test_an_impossible_evaluation_is_refused",
    ),
    Rule(
        CLIENTS,
        "from three clients on an evaluated loss is at most 1000 times the clients' median, now or before",
        "1000",
        "",
        f"{CHECKS}::test_a_loss_far_above_all_others_is_refused",
    ),
    Rule(
        CLIENTS,
        "names of models, and so columns of files, are the server's own; a client's name is printable, on one line",
        "always",
        "",
        f"{CHECKS}::test_model_names_are_the_servers_own",
    ),
    Rule(
        CLIENTS,
        "sizes are whole and positive; a node that reports others is no client of the run",
        "always",
        "",
        f"{CHECKS}::test_an_impossible_size_is_refused",
    ),
    Rule(
        CLIENTS,
        "sizes are fixed when a client is first met; a later change is refused",
        "always",
        "",
        f"{CHECKS}::test_sizes_are_fixed_when_a_client_is_first_met",
    ),
    Rule(
        CLIENTS,
        "a size counts for at most this many times the median and, from four clients on, for no more than all others",
        "100; new apps: 3",
        "`policy.max_size_ratio`",
        f"{CHECKS}::test_a_size_counts_for_at_most_the_ratio_and_all_others_together",
    ),
    Rule(
        CLIENTS,
        "a row longer than this many times the cohort's median is clipped",
        "10; new apps: 5",
        "`policy.max_update_norm`",
        f"{SCREENING}::test_the_limit_is_a_policy",
    ),
    Rule(
        CLIENTS,
        "reported losses, rates and curvatures are held at this many times the cohort's median; where nothing that the "
        "client said earlier could be compared at most at 3 times it, and rows are clipped at 1.5 times the median",
        "off; new apps: 30",
        "`policy.scalar_bounds`",
        f"{SCREENING}::test_scalars_and_rows_of_clients_without_a_record_are_held_more_closely",
    ),
    Rule(
        CLIENTS,
        "a client whose loss does not change as its rows say is left out: the worst ones, at most this share of a "
        "cohort, one of three or four, nobody of two",
        "off; new apps: 0.2",
        "`policy.drop_share`",
        f"{CONSISTENCY}::test_a_false_row_is_found",
    ),
    Rule(
        CLIENTS,
        "whom the others' step has hurt is not left out for it: a loss that rises by more than the rows say, where "
        "their slopes have vanished or turned, is no fault, and neither is what a convex loss can do",
        "always",
        "none",
        f"{CONSISTENCY}::test_whom_a_step_has_hurt_is_not_at_fault",
    ),
    Rule(
        CLIENTS,
        "who is caught so by one round alone stays out for two rounds, and twice as long each further time, 64 at "
        "most; the first time only until its loss agrees with its rows",
        "where `policy.drop_share` is set",
        "`policy.drop_share`",
        f"{CONSISTENCY}::test_who_is_caught_again_stays_out_longer",
    ),
    Rule(
        CLIENTS,
        "a row that its client has sent before, for another model, is refused (the first one and the newest seven)",
        "where `policy.drop_share` is set",
        "`policy.drop_share`",
        f"{SKETCHES}::test_a_row_that_was_sent_for_another_model_is_a_replay_and_at_the_same_model_it_is_none",
    ),
    Rule(
        CLIENTS,
        "a client whose row has turned since the last round as no other client's has is left out, unless its loss has "
        "changed as the two rows say",
        "where `policy.drop_share` is set",
        "`policy.drop_share`",
        f"{SKETCHES}::test_who_turns_alone_is_seen_and_who_turns_with_all_others_is_not",
    ),
    Rule(
        CLIENTS,
        "no client makes a step learnt from votes (dqn-fed, adafed) more than 1.5 times as long as the others alone "
        "would; else it is given a lower rate",
        "where `policy.drop_share` is set",
        "`policy.drop_share`",
        f"{DIRECTIONS}::test_no_row_makes_the_step_far_longer_than_the_others_alone",
    ),
    Rule(
        CLIENTS,
        "no few clients stop the others: a step by curvature (dqn-fed, adafed) is at least half as long as the median "
        "client allows",
        "where `policy.drop_share` is set",
        "`policy.drop_share`",
        f"{STEP_LENGTH}::test_no_few_clients_can_stop_the_others",
    ),
    Rule(
        CLIENTS,
        "a step of local training with all clients (dqn-fed, adafed) is at most 1.25 times the last one",
        "where `policy.drop_share` is set",
        "`policy.drop_share`",
        f"{VOTES}::test_where_replies_may_be_false_a_step_of_local_training_grows_slowly",
    ),
    Rule(
        CLIENTS,
        "a step by curvature is at most as long as the last one where a client of that one is missing; that one that "
        "was left out comes back does not count",
        "where `policy.drop_share` is set",
        "`policy.drop_share`",
        f"{TRUST}::test_who_comes_back_does_not_hold_the_step_and_who_goes_does",
    ),
    Rule(
        CLIENTS,
        "a run whose clients' losses are above those of the start at the end keeps its best evaluated model; no single "
        "client's loss decides",
        "best (in simulation, and with counted noise: last)",
        "`policy.on_worse`",
        f"{GUARD}::test_a_run_that_gets_worse_keeps_its_best_evaluated_model",
    ),
    Rule(
        CLIENTS,
        "a curvature (dqn-fed, adafed) that contradicts the client's own gradients is replaced by what these show",
        "where `policy.drop_share` is set",
        "`policy.drop_share`",
        f"{TRUST}::test_a_false_curvature_is_replaced_by_what_the_gradients_show",
    ),
    Rule(
        CLIENTS,
        "rates (dqn-fed, adafed) stay within this factor of the cohort's median rate per squared gradient",
        "1000; new apps: 10",
        "`policy.rate_bounds`",
        f"{COMMON_STEPS}::test_rates_per_square_stay_within_the_bounds_of_their_median",
    ),
    Rule(
        CLIENTS,
        "whatever is refused is in the log and in metrics.jsonl, with the reason",
        "always",
        "",
        f"{ATTACKS}::test_every_refused_update_is_in_the_metrics_with_its_reason",
    ),
    Rule(
        CLIENTS,
        "statistics of a site's table are of the agreed schema, finite, within its bounds and number of rows; a site "
        "that sends others ends the run before the training",
        "always (apps of `new-app --table`)",
        "",
        f"{STATISTICS}::test_a_site_is_not_believed_unread",
    ),
    Rule(
        CLIENTS,
        "a site of a table app sends nothing but the listed statistics and replies, and no text of its errors",
        "always (apps of `new-app --table`)",
        "",
        "tests/end_to_end/test_sites.py::test_sites_train_the_simulators_model_and_nothing_else_leaves",
    ),
    Rule(
        CLIENTS,
        "no reply ends a run",
        "proceed",
        "`policy.on_missing`",
        f"{FUZZ}::test_random_replies_neither_end_nor_falsify_a_run",
    ),
)
