"""The tests that `make test` runs: all of the quick folders, and one sampled test of the others for each promise of the README.

`make test-all` runs the rest.
"""

from __future__ import annotations

from pathlib import PurePath

_LONG = ("browser", "faults", "integration")
PROMISES = {
    "faults/test_checkpoint_store.py": (
        "test_a_kill_loses_nothing_that_was_acknowledged",
        "test_a_damaged_newest_checkpoint_is_reported_set_aside_and_the_previous_one_used",
    ),
    "faults/test_prepare.py": ("test_34_killed_at_any_time_it_ends_with_the_same_bytes_and_does_nothing_twice",),
    "faults/test_runs.py": ("test_numbers_that_are_not_finite_make_no_update_and_are_in_no_checkpoint",),
    "integration/test_code_of_strangers.py": (
        "test_a_file_of_code_in_a_run_that_was_trained_without_is_never_executed_and_is_reported",
    ),
    "integration/test_dropout_training.py": ("test_a_resumed_run_and_a_replay_have_the_same_bits",),
    "integration/test_elastic.py": ("test_the_bits_do_not_depend_on_the_number_of_ranks",),
    "integration/test_evaluate_run.py": ("test_the_json_object_has_the_validation_loss_of_the_run_and_every_group",),
    "integration/test_generate_command.py": ("test_json_lines_are_the_same_with_and_without_the_cache_and_for_any_batch",),
    "integration/test_golden_losses.py": ("test_the_losses_are_those_on_record",),
    "integration/test_guarded_training.py": ("test_a_run_that_was_rolled_back_equals_one_that_never_saw_the_window",),
    "integration/test_listeners.py": ("test_a_training_on_one_node_cannot_be_reached_and_runs_no_code_of_a_stranger",),
    "integration/test_monitored_training.py": ("test_watching_layers_and_machine_changes_no_bit_and_shows_both",),
    "integration/test_out_of_memory.py": ("test_a_step_that_runs_out_of_memory_is_made_again_with_half_the_rows",),
    "integration/test_own_training_step.py": ("test_an_example_trains_resumes_exactly_and_replays",),
    "integration/test_prepare.py": (
        "test_two_workers_and_one_write_the_same_bytes",
        "test_the_text_can_be_read_back_from_the_rows",
        "test_bad_input_is_one_line_that_names_place_and_remedy",
    ),
    "integration/test_train.py": (
        "test_training_lowers_the_validation_loss_and_leaves_a_complete_run",
        "test_a_run_stopped_anywhere_goes_on_to_the_same_bits",
        "test_a_run_killed_without_warning_repeats_only_what_was_not_saved",
        "test_two_ranks_train_stop_together_and_resume_exactly",
    ),
    "integration/test_train_extension.py": ("test_the_example_model_trains_resumes_exactly_and_can_be_evaluated",),
    "integration/test_two_nodes.py": ("test_a_signal_to_one_node_stops_both_and_both_resume_to_the_bits_of_a_run_on_one_node",),
    "integration/test_verify_run.py": (
        "test_an_untouched_run_is_proven_up_to_the_bits_of_its_steps",
        "test_one_changed_bit_anywhere_is_found_and_its_file_named",
    ),
}
"""Tests of the long folders that `make test` also runs, by their file below `tests`."""


def is_long(path: PurePath, name: str) -> bool:
    """Return whether a test is left to `make test-all`.

    Args:
        path: file of the test, relative to `tests`.
        name: name of the test function.
    """
    return path.parts[0] in _LONG and name not in PROMISES.get(path.as_posix(), ())
