"""The rules of the border to strangers, for the table in the documentation."""

from __future__ import annotations

from dqnfed.experiments.border_rules import Rule

PROXY = "tests/unit/flower/test_proxy.py"
CHECK = "tests/unit/flower/test_deployment_check.py"
GUIDED = "tests/end_to_end/test_flower_deployment.py"
STARTUP = "tests/end_to_end/test_startup.py"

_RULES = (
    (
        "The SuperLink, with its Control and Runtime API, listens on loopback; a proxy for another one is not written",
        "127.0.0.1:8000",
        "`dqnfed deploy proxy --superlink`",
        f"{PROXY}::test_a_superlink_that_others_reach_is_refused",
    ),
    (
        (
            "Ten calls of nodes pass the proxy, by POST; every other call of Flower is answered with 403 (412: a node "
            "that would register itself)"
        ),
        "refused",
        "none",
        f"{PROXY}::test_of_all_calls_of_flower_only_those_of_nodes_pass",
    ),
    (
        "No spelling of a path, no header and no body brings another call through",
        "refused",
        "none",
        f"{PROXY}::test_no_spelling_of_another_path_passes",
    ),
    (
        "What the SuperLink is asked comes from the proxy's file, not from the path that was sent",
        "fixed",
        "none",
        f"{PROXY}::test_what_the_server_is_asked_is_never_what_a_stranger_wrote",
    ),
    (
        (
            "A stranger with `ca.crt`, and a client with its own key, can neither register a node nor start, list or "
            "read runs; a node without a key or with an unknown one is refused; every refusal is in `proxy/refused.log`"
        ),
        "refused and logged",
        "`flwr supernode register`, on the server",
        f"{GUIDED}::test_the_guide_leads_to_the_simulators_model_and_strangers_are_refused",
    ),
    (
        "A message of a node has at most this size",
        "64 MB",
        "`client_max_body_size` in nginx.conf",
        f"{PROXY}::test_a_message_above_the_limit_is_refused",
    ),
    (
        "A deployment whose Control or Runtime API can be reached is found, with exit code 1",
        "wrong",
        "`dqnfed deploy check HOST:PORT`",
        f"{CHECK}::test_a_superlink_without_the_proxy_is_wrong",
    ),
    (
        "Certificates name the server and localhost, are signed by the authority, and are valid for some time yet",
        "14 days",
        "`dqnfed deploy check --days`",
        f"{CHECK}::test_dates_and_names_of_the_certificate",
    ),
    (
        "Private keys are readable by their owner only",
        "wrong",
        "`dqnfed deploy check --key`",
        f"{CHECK}::test_a_key_that_others_may_read_is_wrong",
    ),
    (
        "A node's process reports itself before it loads torch (Flower starts another one after 30 seconds)",
        "torch only to answer a message",
        "none",
        f"{STARTUP}::test_a_clients_app_loads_torch_only_to_answer_a_message",
    ),
    (
        "A node that is killed in mid-round is left out of the round and takes part again once it is back",
        "goes on without it",
        "`policy.on_missing`, `policy.timeout`",
        f"{GUIDED}::test_one_node_killed_in_mid_round_and_one_restarted_leave_the_right_model",
    ),
)
RULES = tuple(Rule("strangers", *row) for row in _RULES)
