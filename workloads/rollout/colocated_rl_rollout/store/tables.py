"""Define the tables of the store: their schema, the statements that change them, and how a row is read. Opens no file.

A prompt's ids stand with its group until it is sealed, tokens as segments of a sample until it is; rows of samples stay
until a checkpoint holds their step, and are only counted from then on (`retired`). Records of batches stay
longer, for the learning curve, without the digests of files that are gone, each with the group's climb to its step.
Clients' turns at the gateway stand with their sessions, until they become samples of a group or are given up; such a
sample has the names of both.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from colocated_rl_api.rungs import WeightVersion
from colocated_rl_rollout.rules.samples import (
    Finish,
    Group,
    Sample,
    SampleState,
    Span,
    Tokens,
)

SCHEMA_VERSION = 3
SCHEMA = """
CREATE TABLE facts (name TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE groups (
    id INTEGER PRIMARY KEY, position INTEGER NOT NULL, prompt_index INTEGER NOT NULL, prompt BLOB,
    step INTEGER, given_up TEXT
);
CREATE INDEX groups_by_step ON groups (step);
CREATE TABLE samples (
    id INTEGER PRIMARY KEY, group_id INTEGER NOT NULL REFERENCES groups,
    state TEXT NOT NULL, reason TEXT NOT NULL DEFAULT '', attempts INTEGER NOT NULL DEFAULT 0,
    idle_attempts INTEGER NOT NULL DEFAULT 0, resent INTEGER NOT NULL DEFAULT 0, finish TEXT, reward REAL,
    ended INTEGER, unversioned INTEGER DEFAULT 0, figures TEXT, session TEXT, grouping TEXT
);
CREATE INDEX samples_by_group ON samples (group_id);
CREATE INDEX samples_by_end ON samples (ended) WHERE ended IS NOT NULL;
CREATE INDEX samples_by_session ON samples (session) WHERE session IS NOT NULL;
CREATE TABLE segments (
    sample_id INTEGER NOT NULL REFERENCES samples, attempt INTEGER NOT NULL,
    ids BLOB NOT NULL, logp BLOB NOT NULL, spans TEXT NOT NULL, PRIMARY KEY (sample_id, attempt)
);
CREATE TABLE batches (
    step INTEGER PRIMARY KEY, record TEXT NOT NULL, kept INTEGER NOT NULL DEFAULT 1, climb TEXT
);
CREATE TABLE evaluations (number INTEGER PRIMARY KEY, step INTEGER NOT NULL, result TEXT NOT NULL);
CREATE TABLE sessions (number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, reward REAL, grouping TEXT, figures TEXT);
CREATE TABLE turns (
    session_id TEXT NOT NULL, number INTEGER NOT NULL, parent INTEGER, messages TEXT NOT NULL,
    setting TEXT NOT NULL, context BLOB NOT NULL, ids BLOB NOT NULL, logp BLOB NOT NULL, spans TEXT NOT NULL,
    finish TEXT, PRIMARY KEY (session_id, number)
) WITHOUT ROWID;
CREATE TABLE retired (state TEXT, reason TEXT, count INTEGER NOT NULL, PRIMARY KEY (state, reason)) WITHOUT ROWID;
"""
ADDED_COLUMNS = {
    ("samples", "ended"): "ALTER TABLE samples ADD COLUMN ended INTEGER;"
    " CREATE INDEX samples_by_end ON samples (ended) WHERE ended IS NOT NULL;",
    ("samples", "resent"): "ALTER TABLE samples ADD COLUMN resent INTEGER NOT NULL DEFAULT 0;",
    ("samples", "unversioned"): "ALTER TABLE samples ADD COLUMN unversioned INTEGER DEFAULT 0;",
    ("samples", "figures"): "ALTER TABLE samples ADD COLUMN figures TEXT;",
    ("samples", "session"): "ALTER TABLE samples ADD COLUMN session TEXT; ALTER TABLE samples ADD COLUMN grouping TEXT;"
    " CREATE INDEX samples_by_session ON samples (session) WHERE session IS NOT NULL;",
    ("batches", "climb"): "ALTER TABLE batches ADD COLUMN climb TEXT;",
    ("sessions", "figures"): "ALTER TABLE sessions ADD COLUMN figures TEXT;",
}
"""A store of an older program with the same schema lacks these, by table and name; that program can go on with it."""

FACT = "INSERT OR REPLACE INTO facts VALUES (?, ?)"
GROUP = "INSERT INTO groups (id, position, prompt_index, prompt) VALUES (?, ?, ?, ?)"
SAMPLE = "INSERT INTO samples (id, group_id, state) VALUES (?, ?, ?)"
MOVE = "UPDATE samples SET state = ?, reason = ?, ended = ? WHERE id = ?"
ATTEMPT = """
UPDATE samples SET state = ?, attempts = ?, idle_attempts = ?, resent = ?, finish = ?, unversioned = ? WHERE id = ?
"""
SEGMENT = "INSERT INTO segments VALUES (?, ?, ?, ?, ?)"
DROP_SEGMENTS = "DELETE FROM segments WHERE sample_id = ?"
WHOLE_SAMPLE = """
INSERT INTO samples (id, group_id, state, attempts, finish, reward, ended, unversioned, figures, session, grouping)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
"""
SCORE = "UPDATE samples SET state = ?, reward = ?, ended = ?, figures = ? WHERE id = ?"
SEAL_GROUP = "UPDATE groups SET step = ?, prompt = NULL WHERE id = ?"
BATCH = "INSERT INTO batches (step, record) VALUES (?, ?)"
GIVE_UP_GROUP = "UPDATE groups SET given_up = ?, prompt = NULL WHERE id = ?"
COMMIT = """
UPDATE samples SET state = 'trained' WHERE state = 'sealed' AND group_id IN (SELECT id FROM groups WHERE step <= ?)
"""
ALIVE = """
SELECT id, group_id, state, attempts, idle_attempts, resent, finish, reward, ended, figures FROM samples
WHERE group_id IN (SELECT id FROM groups WHERE step IS NULL AND given_up IS NULL) ORDER BY id
"""
DONE = "SELECT id FROM groups WHERE step <= ? OR given_up IS NOT NULL"
RETIRE = f"""
INSERT INTO retired SELECT state, reason, COUNT(*) FROM samples WHERE group_id IN ({DONE}) GROUP BY state, reason
ON CONFLICT (state, reason) DO UPDATE SET count = count + excluded.count
"""
SESSION = "INSERT INTO sessions (id) VALUES (?)"
SESSIONS = "SELECT id, reward, grouping, figures FROM sessions ORDER BY number"
REWARD_SESSION = "UPDATE sessions SET reward = ?, grouping = ?, figures = ? WHERE id = ?"
REWARD_OF_SAMPLE = "SELECT reward, grouping, figures FROM samples WHERE session = ? ORDER BY id DESC LIMIT 1"
TURN = "INSERT INTO turns VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
CUT_TURN = "UPDATE turns SET finish = 'length' WHERE session_id = ? AND number = ?"
DROP_SESSION = "DELETE FROM sessions WHERE id = ?"
DROP_TURNS = "DELETE FROM turns WHERE session_id = ?"
FORGET_SESSIONS = "DELETE FROM turns", "DELETE FROM sessions"  # all of them
SHOWN = """
SELECT samples.id, group_id, prompt_index, state, reason, attempts, resent, finish, reward, step, ended,
unversioned, figures FROM samples JOIN groups ON groups.id = group_id
"""
ENDED = f"""{SHOWN}
WHERE ended > :after AND ended <= :up_to AND (:state IS NULL OR state = :state) ORDER BY ended LIMIT :limit
"""
RECENT = f"""{SHOWN}
WHERE (:state IS NULL OR state = :state) AND (:before IS NULL OR samples.id < :before)
ORDER BY samples.id DESC LIMIT :limit
"""
NUMBERED = f"""{SHOWN}
WHERE samples.id > :after AND (:state IS NULL OR state = :state) ORDER BY samples.id LIMIT :limit
"""
BEFORE_NEWEST = """
SELECT COALESCE(MIN(id) - 1, (SELECT MAX(id) FROM samples), 0) FROM
(SELECT id FROM samples WHERE :state IS NULL OR state = :state ORDER BY id DESC LIMIT COALESCE(:limit, -1))
"""
RETIRED_BATCHES = """
SELECT step FROM batches WHERE kept AND step <= (SELECT value FROM facts WHERE name = 'saved_step') ORDER BY step
"""
CLIMB = "UPDATE batches SET climb = ? WHERE step = ? AND climb IS NULL"
FORGET_CLIMBS = "UPDATE batches SET climb = NULL"
RECORDS = """
SELECT json_set(record, '$.climb', json(climb)) AS record FROM batches WHERE step > ? ORDER BY step LIMIT ?
"""
DROP_BATCHES = "UPDATE batches SET kept = 0 WHERE step <= ?"
DROP_DIGESTS = """
UPDATE batches SET record = json_set(record, '$.sha256', json('[]'))
WHERE step BETWEEN ? AND ? AND step < (SELECT MAX(step) FROM batches)
"""
DROP_RECORDS = "DELETE FROM batches WHERE kept = 0 AND step <= (SELECT MAX(step) FROM batches) - ?"


def sample_of(row: Sequence[Any], group: Group) -> Sample:
    """Build a sample without its tokens, from the columns of `ALIVE`."""
    number, _, state, attempts, idle_attempts, resent, finish, reward, ended, figures = row
    return Sample(
        number,
        group,
        SampleState(state),
        attempts=attempts,
        idle_attempts=idle_attempts,
        resent=resent,
        finish=Finish(finish) if finish else None,
        reward=reward,
        figures=unpacked_figures(figures),
        ended=ended,
    )


def shown(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of `SHOWN` as people read it."""
    return {**row, "figures": unpacked_figures(row["figures"])}


def packed_figures(figures: Mapping[str, float]) -> str | None:
    """Pack figures into their column; None without any."""
    return json.dumps({**figures}, separators=(",", ":")) if figures else None


def unpacked_figures(figures: str | None) -> dict[str, float]:
    """Unpack figures from their column."""
    found: dict[str, float] = json.loads(figures) if figures else {}
    return found


def packed(tokens: Tokens) -> tuple[bytes, bytes, str]:
    """Pack a segment into the columns ids, logp and spans."""
    spans = [[span.version and str(span.version), span.start, span.end] for span in tokens.spans]
    return tokens.ids.tobytes(), tokens.logp.tobytes(), json.dumps(spans, separators=(",", ":"))


def unpacked(ids: bytes, logp: bytes, spans: str) -> Tokens:
    """Unpack a segment from its columns."""
    listed: Iterable[tuple[str | None, int, int]] = json.loads(spans)
    return Tokens(
        np.frombuffer(ids, np.int32),
        np.frombuffer(logp, np.float32),
        tuple(Span(WeightVersion.parse(text) if text else None, start, end) for text, start, end in listed),
    )
