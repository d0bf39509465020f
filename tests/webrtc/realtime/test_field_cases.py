"""Which field case of first priority is held by which test: barge-in, position, session end, isolation, bad media.

The list of cases is the team's. One of them has no subject here: T-BI-10 is about a client of the command line that
plays by itself, and duplexd has none.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent.parent
FIELD, SESSION, ROUTES = (f"webrtc/realtime/test_{name}.py" for name in ("field", "session", "routes"))
MACHINE, DAEMON, TALK = "webrtc/realtime/test_machine.py", "webrtc/test_daemon.py", "engine/test_conversation.py"
RECEIVE, CAMERA, SPEAKING = "webrtc/test_receive.py", "webrtc/test_camera.py", "media/test_speaking.py"
PAGE, SIMULATE = "page/test_page_logic.py", "simulation/test_simulate.py"
CHANNELS, FIELD_DAEMON = "webrtc/test_peer_channels.py", "webrtc/realtime/test_field_daemon.py"

CASES: dict[str, tuple[str, str]] = {
    "T-BI-01": (TALK, "test_history_is_what_was_heard_at_random_interruptions"),
    "T-BI-02": (FIELD, "test_a_cancel_carries_the_position_and_does_not_race_the_text"),
    "T-BI-04": (FIELD, "test_fifty_replies_of_any_length_are_remembered_to_the_byte"),
    "T-BI-05": (FIELD, "test_an_interruption_silences_within_the_target_wherever_it_falls"),
    "T-BI-07": (SESSION, "test_a_truncation_beyond_the_sound_is_an_error_and_the_session_goes_on"),
    "T-BI-08": (FIELD, "test_truncating_before_the_first_sound_is_no_error"),
    "T-BI-11": (FIELD, "test_an_answer_that_was_never_reached_leaves_the_history_with_its_preamble_cut"),
    "T-BI-14": (SESSION, "test_cancelling_before_a_sound_leaves_nothing"),
    "T-BI-16": (FIELD, "test_of_a_reply_that_was_interrupted_not_a_sample_leaves_ever_again"),
    "T-BI-17": (FIELD, "test_of_a_reply_that_was_interrupted_not_a_sample_leaves_ever_again"),
    "T-BI-22": (FIELD, "test_everything_is_made_and_still_plays_and_can_be_interrupted"),
    "T-BI-23": (SESSION, "test_a_late_acknowledgement_is_counted_and_nothing_else"),
    "T-BI-25": (TALK, "test_a_page_that_reports_nothing_is_paced_by_a_conservative_clock"),
    "T-BI-26": (FIELD, "test_work_for_an_old_reply_ends_within_one_step"),
    "T-BI-28": (FIELD, "test_ten_interruptions_cost_the_next_reply_nothing"),
    "T-BI-31": (SESSION, "test_cancelling_before_a_sound_leaves_nothing"),
    "T-BI-32": (FIELD, "test_a_hundred_random_stops_leave_the_states_sane"),
    "T-BI-34": (FIELD, "test_ten_interruptions_cost_the_next_reply_nothing"),
    "T-BI-35": (SESSION, "test_clearing_the_output_stops_it_and_the_next_reply_is_accepted"),
    "T-BI-38": (SESSION, "test_a_late_acknowledgement_is_counted_and_nothing_else"),
    "T-BI-40": (MACHINE, "test_a_cancel_that_races_a_turns_own_reply_leaves_one_or_none"),
    "T-PP-01": (FIELD, "test_the_buffer_stops_when_the_last_sample_has_gone"),
    "T-PP-02": (FIELD, "test_a_client_that_never_reports_hangs_nobody"),
    "T-PP-04": (SPEAKING, "test_who_speaks_and_is_not_heard_for_two_seconds_shows_that_it_thinks_and_is_counted"),
    "T-PP-08": (FIELD, "test_two_seconds_of_a_clients_own_buffer_are_not_mistaken_for_heard"),
    "T-RC-04": (CHANNELS, "test_a_call_whose_channel_is_closed_ends_after_its_grace"),
    "T-RC-05": (PAGE, "test_a_picture_that_stands_still_is_told_and_a_broken_connection_made_anew"),
    "T-RC-07": (PAGE, "test_ten_visits_leave_no_microphone_open"),
    "T-RC-08": (FIELD_DAEMON, "test_who_closes_and_comes_again_is_taken_at_once"),
    "T-RC-11": (ROUTES, "test_closing_at_any_moment_gives_everything_back"),
    "T-ISO-01": (FIELD, "test_in_two_hundred_turns_nobody_hears_a_strangers_word"),
    "T-ISO-02": (FIELD, "test_who_joins_and_leaves_repeats_nothing_of_a_neighbours"),
    "T-ISO-04": (FIELD, "test_a_fault_in_one_session_changes_no_bit_of_a_neighbours_sound"),
    "T-CON-01": (RECEIVE, "test_of_eight_people_at_once_nothing_waits_longer_than_for_a_lost_packet"),
    "T-CON-02": (SIMULATE, "test_more_listeners_than_the_device_can_serve_are_told_busy_and_the_others_hear_no_gaps"),
    "T-CON-04": ("webrtc/test_tracks.py", "test_work_that_blocks_all_of_the_loops_threads_delays_no_packet"),
    "T-CON-05": (ROUTES, "test_twenty_at_once_at_a_daemon_for_three_leave_three_and_typed_refusals"),
    "T-CON-07": (ROUTES, "test_twenty_at_once_at_a_daemon_for_three_leave_three_and_typed_refusals"),
    "T-BAD-01": (RECEIVE, "test_a_hostile_payload_makes_nobody_deaf"),
    "T-BAD-02": (CAMERA, "test_damaged_frames_are_counted_and_the_next_key_frame_is_looked_at"),
    "T-BAD-04": (MACHINE, "test_whatever_a_client_does_the_order_holds"),
    "T-BAD-05": (ROUTES, "test_abuse_gets_errors_and_the_neighbour_hears_nothing_of_it"),
    "T-BAD-07": ("webrtc/realtime/test_items.py", "test_pictures_are_judged_by_their_header"),
}
FIRST_PRIORITY = re.compile(r"T-(BI|PP|RC|ISO|CON|BAD)-\d\d")


@pytest.mark.parametrize("case", sorted(CASES))
def test_the_case_is_held_by_a_test_that_exists(case: str) -> None:
    file, name = CASES[case]

    assert re.search(rf"def {name}\(", (TESTS / file).read_text()), f"{case}: {file} has no {name}"


def test_every_case_has_a_name_of_the_list() -> None:
    assert all(FIRST_PRIORITY.fullmatch(case) for case in CASES)
