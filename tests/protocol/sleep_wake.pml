/*
 * Sleep and wake of one model on two ranks, as the code does it: a coordinator that may die once, ranks of which one
 * may die or fall silent for good, calls that may be lost, late, out of order or doubled. test_model_checking.py has
 * spin look at every state that can be reached.
 *
 * What stands for what:
 *   coordinator()   actors/coordinator/machine.py (TABLE, _pass_over) over gathering.py (answer, _targets),
 *                   driver.py (calls, deadlines, asking again) and reconcile.py + judge.py after a restart
 *   rank(r)         actors/rank/phases.py over transaction.py (said), machinery.py (engine, ledger)
 *   g, hold_*       actors/rank/gate.py at the leader, which is rank 0
 *   journal_*       actors/coordinator/journal.py: operations.state and operations.decided
 *
 * How far it goes:
 *   - Two operations, one after the other, each of the kind that changes something; the first may find the model awake
 *     or asleep. Operations that change nothing go the same way with less to do.
 *   - reserve and lock are folded into the answers before them: they only say yes or no.
 *   - An answer belongs to its call: one that comes after the step is over is dropped (Machine.handle), so it is not
 *     kept. A lost answer and a lost call are told apart by what the rank has done.
 *   - Time: each wait may end at any moment but two. Steps that insist (commit, publish, open, abort, reopen) run out of
 *     time only when a rank is silent for good. A drain's lease outlasts the deadlines from there to the end of an abort
 *     (Driver._lease_s) and a restart of the coordinator, so it ends when a coordinator died in the drain, or after the
 *     operation where the leader did not hear of its end.
 *   - `status` brings a new coordinator's epoch (RankStatus.epoch, RankPort.status), and tells of a stage that runs
 *     (staging), of what is staged (staged_digest) and of who holds the gate (gate_operation). An abort for a model that
 *     is lost closes the gate for good (RankPort.abort: lost). A new journal takes an epoch above all that ranks have
 *     seen (Coordinator.start).
 *   - A drain freezes what runs or waits for it, as the request says. Frozen requests run again when the leader's engine
 *     does; a step is one of all ranks.
 *   - `in_doubt` is a word for people: the gate is as closed as before.
 */

#ifndef OPERATIONS
#define OPERATIONS 2
#endif
#ifndef REQUESTS
#define REQUESTS 1
#endif

/* What may go wrong, and how often. */
#ifndef CRASHES
#define CRASHES 1        /* of the coordinator */
#endif
#ifndef RANK_FAULTS
#define RANK_FAULTS 1    /* a rank dies, or falls silent for good */
#endif
#ifndef LOSSES
#define LOSSES 1         /* calls or answers */
#endif
#ifndef DOUBLES
#define DOUBLES 1        /* calls that are carried out and come once more, whenever */
#endif
#ifndef REFUSALS
#define REFUSALS 1       /* a rank, a budget, a lock or the journal says no */
#endif
#ifndef MISMATCHES
#define MISMATCHES 1     /* rank 1 stages something else than rank 0 */
#endif
#ifndef JOURNAL_LOSSES
#define JOURNAL_LOSSES 0 /* the dead coordinator's journal is not found again */
#endif

/* Steps (steps.py: Step), then what lies around an operation. */
#define PREFLIGHT 1
#define DRAIN     2
#define STAGE     3
#define DOUBT     4
#define DECIDE    5
#define COMMIT    6
#define PUBLISH   7
#define OPEN      8
#define WITHDRAW  9
#define ABORT    10
#define REOPEN   11
#define DONE     12
#define DOWN     13 /* the coordinator is dead */
#define SETTLE   14 /* Reconciler */
#define REST     15

#define INSISTENT (step >= COMMIT && step != WITHDRAW && step <= REOPEN)

/* Answers and signals (gathering.py: Answer, machine.py: Signal). */
#define NONE    0
#define YES     1
#define NO      2
#define LOST    3
#define EXPIRED 4
#define CANCEL  5

#define SUCCEEDED 1
#define REJECTED  2
#define FAILED    3

#define SLEEP 0
#define WAKE  1

/* A rank's ledger (messages.py: LedgerPhase). STAGING is what `status` says while a stage runs. */
#define IDLE       0
#define STAGING    1
#define STAGED     2
#define COMMITTING 3
#define COMMITTED  4

/* What a rank has answered in an operation (transaction.py: Transaction.replies, aborting). */
#define PREFLIGHT_YES 1
#define PREFLIGHT_NO  2
#define STAGE_YES     4
#define STAGE_NO      8
#define COMMIT_YES   16
#define PUBLISH_YES  32
#define ABORTING     64

/* The gate. */
#define G_OPEN      0
#define G_DRAINING  1
#define G_HELD      2 /* sleeping, waking */
#define G_ASLEEP    3
#define G_UNDEFINED 4
#define G_FAILED    5

/* Calls under way are bits: which call, of which operation, in which epoch. */
#define CALLS       7
#define C_PREFLIGHT 0
#define C_DRAIN     1
#define C_STAGE     2
#define C_COMMIT    3
#define C_PUBLISH   4
#define C_ABORT     5
#define C_ABORT_FOR_GOOD 6 /* take it back, but leave the gate closed */
#define BIT(call, o, e) (1 << ((call) + CALLS * ((o) + 2 * (e))))

byte crashes = CRASHES, rank_faults = RANK_FAULTS, losses = LOSSES, doubles = DOUBLES;
byte refusals = REFUSALS, mismatches = MISMATCHES, journal_losses = JOURNAL_LOSSES, requests = REQUESTS;

/* The network. */
int under_way[2];
byte answer[2];       /* to the step in hand */
bool went_missing[2]; /* the last call of this step, or its answer: to be asked again */

/* The coordinator. */
byte step = REST, op, verdict, epoch, begun;
byte ans[2], targets, to_send, sig;
byte kind[2];
bool failed;          /* Published.failed */
bool stays_closed;    /* the leader has said so with its commit */
bool lease_holds[2];  /* drained by a coordinator that lives, or asked to stage; and the operation has not ended */
byte seen[2], seen_phase[2], seen_op[2], seen_hold;

/* The journal. */
#define ABSENT   0
#define RUNNING  1
#define FINISHED 2
byte journal_state[2];
bool journal_decided[2];

/* The ranks. */
bool alive[2] = true, silent[2];
byte heard_epoch[2];
byte phase[2], current[2], last[2]; /* current, last: operation + 1 */
byte said[4];                       /* [2 * rank + operation] */
byte staging[2];                    /* operation + 1 whose stage runs; it has the turn */
bool parked[2], undefined[2], stepping[2], other_plan[2];
bool discards;                      /* the sleep keeps no contents: awake again they are undefined (C9) */

/* The leader's gate. */
byte g, hold, before;
bool hold_staging, hold_leased, running;
bool hold_freezes, frozen;          /* requests that stand still until the engine steps */
byte planned;                       /* Phases._planned: the last operation that had a preflight here, + 1 */
byte rests_for;                     /* Machinery._rests_for: operation + 1 whose stage stopped the leader's engine */
#ifdef FAILED_STAGES_RESUME
bool thaw_after;
#endif
byte draining, draining_epoch;      /* operation + 1 whose drain waits for running requests */

/* What was ever true, for assertions only. */
bool was_decided[2], is_firm[2]; /* firm: the coordinator was told that the decision is on the disk */
byte has_committed[2], has_aborted[2]; /* bits by rank */
bool withdrawn_lost; /* while a preflight or a drain was taken back, a rank was found gone */

#define REACHABLE(r) (alive[r] && !silent[r])
#define SAID(r, o)   said[2 * (r) + (o)]
#define SERVES(r)    (!parked[r] && !undefined[r])

/* What must hold in every state. A silent rank counts: it holds its memory. */
inline check()
{
	assert(!(alive[0] && g == G_OPEN && (!SERVES(0) || phase[0] != IDLE)));
	assert(!(alive[0] && g == G_OPEN && alive[1] && (!SERVES(1) || phase[1] != IDLE)));
	assert(!(running && (!SERVES(0) || phase[0] != IDLE || staging[0])));
	assert(!(running && alive[1] && (!SERVES(1) || phase[1] != IDLE)));
	/* An engine steps only over memory that nobody moves. */
	assert(!(alive[0] && stepping[0] && (!SERVES(0) || phase[0] != IDLE)));
	assert(!(alive[1] && stepping[1] && (!SERVES(1) || phase[1] != IDLE)))
}

/* ---------------------------------------------------------------- the gate */

inline undo_hold()
{
	hold = 0; hold_staging = false; hold_leased = false; hold_freezes = false;
	if :: g != G_FAILED -> g = before :: else fi;
	before = G_OPEN
}

/* Gate.release, with the end of a drain that waits. */
inline release(o)
{
	if
	:: hold == o + 1 ->
		undo_hold();
		if
		:: draining == o + 1 -> draining = 0; tell(0, C_DRAIN, o, draining_epoch, NO)
		:: else
		fi
	:: else
	fi
}

/* Gate._take; the caller has seen to it that nobody else has staged. */
inline take(o)
{
	if
	:: hold != 0 && hold != o + 1 ->
		if :: draining != 0 -> tell(0, C_DRAIN, draining - 1, draining_epoch, NO); draining = 0 :: else fi;
		undo_hold()
	:: else
	fi;
	if :: hold == 0 -> hold = o + 1; before = g :: else fi
}

/* The leader's engine steps again, and with it what it has suspended. */
inline thaw()
{
	if :: stepping[0] && frozen -> frozen = false; running = true :: else fi
}

inline fail_gate()
{
	g = G_FAILED; running = false; frozen = false;
	if :: draining != 0 -> tell(0, C_DRAIN, draining - 1, draining_epoch, NO); draining = 0 :: else fi
}

/* ---------------------------------------------------------------- answers */

/* The step that a call belongs to; an answer to another step, operation or epoch is dropped. */
#define ASKS(call) \
	( (call == C_PREFLIGHT && step == PREFLIGHT) || (call == C_DRAIN && step == DRAIN) \
	|| (call == C_STAGE && step == STAGE) || (call == C_COMMIT && step == COMMIT) \
	|| (call == C_PUBLISH && (step == PUBLISH || step == OPEN)) \
	|| (call >= C_ABORT && (step == WITHDRAW || step == ABORT || step == REOPEN)) )

inline tell(r, call, o, e, what)
{
	if
	:: ASKS(call) && o == op && e == epoch && (targets & (1 << r)) && ans[r] == NONE && answer[r] == NONE ->
		if
		:: answer[r] = what; went_missing[r] = false
		:: losses > 0 -> losses--; went_missing[r] = true
		fi
	:: else
	fi
}

/* ---------------------------------------------------------------- a rank */

inline on_preflight(r, o, e)
{
	if
	:: (SAID(r, o) & ABORTING) -> tell(r, C_PREFLIGHT, o, e, NO)
	:: else ->
		if
		:: (SAID(r, o) & (PREFLIGHT_YES | PREFLIGHT_NO)) -> skip
		:: else ->
			if
			:: phase[r] == IDLE ->
				SAID(r, o) = SAID(r, o) | PREFLIGHT_YES;
				if :: r == 0 -> planned = o + 1 :: else fi
			:: phase[r] != IDLE -> SAID(r, o) = SAID(r, o) | PREFLIGHT_NO
			:: refusals > 0 -> refusals--; SAID(r, o) = SAID(r, o) | PREFLIGHT_NO
			fi
		fi;
		if
		:: (SAID(r, o) & PREFLIGHT_YES) -> tell(r, C_PREFLIGHT, o, e, YES)
		:: else -> tell(r, C_PREFLIGHT, o, e, NO)
		fi
	fi
}

inline on_drain(o, e)
{
	if
	:: (SAID(0, o) & ABORTING) -> tell(0, C_DRAIN, o, e, NO)
#ifndef OLD_DRAINS_OVERTAKE
	:: !(SAID(0, o) & ABORTING) && (SAID(0, o) & PREFLIGHT_YES) && planned != o + 1 -> tell(0, C_DRAIN, o, e, NO)
#endif
	:: else ->
		if
		:: hold != 0 && hold != o + 1 && hold_staging -> tell(0, C_DRAIN, o, e, NO) /* GateHeld */
		:: else ->
			take(o);
			hold_leased = false;
			if
			:: g == G_FAILED -> tell(0, C_DRAIN, o, e, NO)
			:: else ->
				g = G_DRAINING;
				if
				/* An operation has one mode, however often its drain comes. */
				:: running && !hold_freezes -> draining = o + 1; draining_epoch = e
				:: running && draining != o + 1 -> hold_freezes = true; hold_leased = true; tell(0, C_DRAIN, o, e, YES)
				:: else -> hold_leased = true; tell(0, C_DRAIN, o, e, YES)
				fi
			fi
		fi
	fi
}

/* The beginning of a stage: the gate is kept closed, the engine comes to rest. */
inline on_stage(r, o, e)
{
	if
	:: (SAID(r, o) & ABORTING) -> tell(r, C_STAGE, o, e, NO)
	:: !(SAID(r, o) & ABORTING) && (SAID(r, o) & STAGE_YES) -> tell(r, C_STAGE, o, e, YES)
	:: !(SAID(r, o) & ABORTING) && (SAID(r, o) & STAGE_NO) -> tell(r, C_STAGE, o, e, NO)
	:: !(SAID(r, o) & (ABORTING | STAGE_YES | STAGE_NO)) ->
		if
		:: (!(SAID(r, o) & PREFLIGHT_YES)
			|| (r == 0 && (g == G_OPEN || (running && !(hold == o + 1 && hold_freezes)) || (hold != 0 && hold != o + 1 && hold_staging)))) ->
			SAID(r, o) = SAID(r, o) | STAGE_NO;
			tell(r, C_STAGE, o, e, NO)
		:: else ->
			if
			:: r == 0 ->
				take(o);
				hold_staging = true; hold_leased = false;
				if :: g != G_FAILED -> g = G_HELD :: else fi;
				if :: running -> running = false; frozen = true :: else fi;
				rests_for = o + 1
			:: else
			fi;
			staging[r] = o + 1;
			stepping[r] = false
		fi
	fi
}

/* A follower comes to rest only after the leader, or is out of time. (Without requests it need not wait here: more
 * may happen in the model than there.) */
#define WAITS(r) ((r) == 1 && running)

/* Its end. Whatever the answer, the leader's gate stays held: others may have staged. */
inline end_stage(r)
{
	if
	:: !(SAID(r, staging[r] - 1) & ABORTING) && phase[r] == IDLE && !WAITS(r) ->
		phase[r] = STAGED; current[r] = staging[r];
		SAID(r, staging[r] - 1) = SAID(r, staging[r] - 1) | STAGE_YES;
		if
		:: other_plan[r] = false
		:: r == 1 && mismatches > 0 -> mismatches--; other_plan[r] = true
		fi;
		tell(r, C_STAGE, staging[r] - 1, heard_epoch[r], YES)
	:: (SAID(r, staging[r] - 1) & ABORTING) || phase[r] != IDLE || WAITS(r) || refusals > 0 ->
		if :: !(SAID(r, staging[r] - 1) & ABORTING) && phase[r] == IDLE && !WAITS(r) -> refusals-- :: else fi;
		/* A follower only follows. The leader rests: others may have staged. */
		if
		:: r == 1 && phase[r] == IDLE && SERVES(r) -> stepping[r] = true
#ifdef FAILED_STAGES_RESUME
		:: r == 0 && phase[r] == IDLE && SERVES(r) -> stepping[r] = true; thaw_after = true
#endif
		:: else
		fi;
		SAID(r, staging[r] - 1) = SAID(r, staging[r] - 1) | STAGE_NO;
		tell(r, C_STAGE, staging[r] - 1, heard_epoch[r], NO)
	fi;
	staging[r] = 0;
#ifdef FAILED_STAGES_RESUME
	if :: thaw_after -> thaw_after = false; thaw() :: else fi
#endif
}

inline on_commit(r, o, e)
{
	if
	:: (SAID(r, o) & COMMIT_YES) -> tell(r, C_COMMIT, o, e, YES)
	:: !(SAID(r, o) & COMMIT_YES) && !(SAID(r, o) & STAGE_YES) -> tell(r, C_COMMIT, o, e, NO)
	:: else -> phase[r] = COMMITTING
	fi
}

inline end_commit(r)
{
	op_in_hand = current[r] - 1;
	assert(was_decided[op_in_hand]); /* nothing is committed without a decision */
	assert(!((has_aborted[op_in_hand] & 1) && REACHABLE(0)));
	assert(!((has_aborted[op_in_hand] & 2) && REACHABLE(1)));
	has_committed[op_in_hand] = has_committed[op_in_hand] | (1 << r);
	if
	:: kind[op_in_hand] == SLEEP -> parked[r] = true; undefined[r] = false
	:: else -> parked[r] = false; undefined[r] = discards
	fi;
	phase[r] = COMMITTED; last[r] = current[r];
	SAID(r, op_in_hand) = SAID(r, op_in_hand) | COMMIT_YES;
	tell(r, C_COMMIT, op_in_hand, heard_epoch[r], YES);
	op_in_hand = 0
}

inline on_publish(r, o, e)
{
	if
	:: (SAID(r, o) & PUBLISH_YES) -> tell(r, C_PUBLISH, o, e, YES)
	:: !(SAID(r, o) & PUBLISH_YES) && !(SAID(r, o) & COMMIT_YES) -> tell(r, C_PUBLISH, o, e, NO)
	:: else ->
		phase[r] = IDLE; current[r] = 0;
		stepping[r] = SERVES(r);
		if
		:: r == 0 ->
			thaw();
			if
			:: hold == o + 1 ->
				hold = 0; hold_staging = false; hold_leased = false; hold_freezes = false; before = G_OPEN
			:: else
			fi;
			if
			:: g == G_FAILED -> skip
			:: g != G_FAILED && parked[0] -> g = G_ASLEEP
			:: g != G_FAILED && !parked[0] && undefined[0] -> g = G_UNDEFINED
			:: else -> g = G_OPEN
			fi
		:: else
		fi;
		SAID(r, o) = SAID(r, o) | PUBLISH_YES;
		tell(r, C_PUBLISH, o, e, YES)
	fi
}

inline on_abort(r, call, o, e)
{
	if
	:: (SAID(r, o) & COMMIT_YES) -> tell(r, call, o, e, NO)
	:: else ->
		SAID(r, o) = (SAID(r, o) | ABORTING) & ~STAGE_YES;
		if
		:: phase[r] == STAGED && current[r] == o + 1 ->
			assert(!((has_committed[o] & 1) && REACHABLE(0)));
			assert(!((has_committed[o] & 2) && REACHABLE(1)));
			has_aborted[o] = has_aborted[o] | (1 << r);
			phase[r] = IDLE; current[r] = 0; other_plan[r] = false;
			stepping[r] = SERVES(r)
#ifdef ABORT_RESUMES_ANYHOW
		:: phase[r] != IDLE && current[r] != o + 1 -> stepping[r] = SERVES(r)
#endif
#ifdef LATE_ABORTS_RESUME
		:: phase[r] == IDLE -> stepping[r] = SERVES(r)
#else
		:: phase[r] == IDLE && (r == 1 || rests_for == o + 1) -> stepping[r] = SERVES(r)
#endif
		:: else /* another operation's: leave it alone */
		fi;
		if :: r == 0 -> thaw() :: else fi;
		if
		:: r == 0 && call == C_ABORT_FOR_GOOD -> release(o); fail_gate()
		:: r == 0 && call == C_ABORT -> release(o)
		:: else
		fi;
		tell(r, call, o, e, YES)
	fi
}

/* A call that a rank may take now. While a stage or a commit has the turn, only the abort of the stage gets through. */
#define TURN_IS_FREE(r) (!staging[r] && phase[r] != COMMITTING)

inline pick(r)
{
	do
	:: (under_way[r] & (1 << b)) -> break
	:: (under_way[r] >> (b + 1)) -> b++
	od;
	c = b % CALLS; o = (b / CALLS) % 2; e = b / (2 * CALLS);
	if
	:: under_way[r] = under_way[r] & ~(1 << b)
	:: doubles > 0 -> doubles--
	fi;
	b = 0
}

inline die(r)
{
	under_way[r] = 0;
	phase[r] = IDLE; current[r] = 0; last[r] = 0; staging[r] = 0; heard_epoch[r] = 0;
	SAID(r, 0) = 0; SAID(r, 1) = 0;
	parked[r] = false; undefined[r] = false; stepping[r] = false; other_plan[r] = false;
	alive[r] = false;
	if
	:: r == 0 -> g = G_FAILED; hold = 0; before = G_OPEN; hold_staging = false; hold_leased = false;
		running = false; frozen = false; hold_freezes = false; draining = 0; draining_epoch = 0; planned = 0; rests_for = 0
	:: else
	fi
}

proctype rank(byte r)
{
	byte b, c, o, e, op_in_hand;

end:	do
	:: atomic { TURN_IS_FREE(r) && under_way[r] != 0 ->
		pick(r);
		if
		:: e < heard_epoch[r] -> skip /* refused; who asked is dead */
		:: else ->
			heard_epoch[r] = e;
			if
			:: c == C_PREFLIGHT -> on_preflight(r, o, e)
			:: c == C_DRAIN && r == 0 -> on_drain(o, e)
			:: c == C_STAGE -> on_stage(r, o, e)
			:: c == C_COMMIT -> on_commit(r, o, e)
			:: c == C_PUBLISH -> on_publish(r, o, e)
			:: c >= C_ABORT -> on_abort(r, c, o, e)
			fi
		fi;
		c = 0; o = 0; e = 0;
		check() }
	/* An abort goes past the queue and stops the stage; then it waits for its turn. */
	:: atomic { (staging[r] && !(SAID(r, staging[r] - 1) & ABORTING)
		&& (under_way[r] & (BIT(C_ABORT, staging[r] - 1, 0) | BIT(C_ABORT, staging[r] - 1, 1)
			| BIT(C_ABORT_FOR_GOOD, staging[r] - 1, 0) | BIT(C_ABORT_FOR_GOOD, staging[r] - 1, 1)))) ->
		SAID(r, staging[r] - 1) = SAID(r, staging[r] - 1) | ABORTING }
	:: atomic { staging[r] -> end_stage(r); check() }
	:: atomic { phase[r] == COMMITTING -> end_commit(r); check() }
	:: atomic { rank_faults > 0 && alive[r] -> rank_faults--; die(r); check() }
	/* Silent: it lives and holds its memory, and neither hears nor is heard any more. */
	:: atomic { rank_faults > 0 && alive[r] -> rank_faults--; silent[r] = true; under_way[r] = 0 }
	od
}

/* The leader's door: requests come and go, drains end, leases end. */
proctype door()
{
end:	do
	:: atomic { g == G_OPEN && alive[0] && requests > 0 -> requests--; running = true; check() }
	:: atomic { running -> running = false }
	:: atomic { draining != 0 && !running ->
		hold_leased = true; tell(0, C_DRAIN, draining - 1, draining_epoch, YES); draining = 0 }
	:: atomic { draining != 0 && running -> release(draining - 1); check() } /* the drain is out of time */
#ifdef LEASE_ENDS_A_STAGE
	:: atomic { hold != 0 && hold_staging -> undo_hold(); check() }
#endif
	:: atomic { hold != 0 && hold_leased && !hold_staging && !lease_holds[hold - 1] -> undo_hold(); check() }
	od
}

/* ---------------------------------------------------------------- the coordinator */

/* Gathering.ask: the step's targets have not answered; who is lost stays lost. In doubt, what is staged stays answered. */
inline enter(s)
{
	step = s;
	if
	:: s == OPEN && stays_closed -> targets = 0 /* it has published with the others */
	:: (s == OPEN && !stays_closed) || s == DRAIN || s == REOPEN -> targets = 1
#ifdef LEADER_OPENS_WITH_THE_OTHERS
	:: s == PUBLISH -> targets = 3
#else
	:: s == PUBLISH -> targets = (stays_closed -> 3 : 2)
#endif
	:: s == ABORT -> targets = 2
	:: s == DECIDE || s == DONE -> targets = 0
	:: else -> targets = 3
	fi;
#ifdef REOPEN_WITH_THE_ABORT
	if :: s == ABORT -> targets = 3 :: else fi;
#endif
	if :: ans[0] == LOST -> targets = targets & 2 :: ans[0] == YES && s == DOUBT -> skip :: else -> ans[0] = NONE fi;
	if :: ans[1] == LOST -> targets = targets & 1 :: ans[1] == YES && s == DOUBT -> skip :: else -> ans[1] = NONE fi;
	if :: s == DOUBT -> to_send = 0 :: else -> to_send = targets fi;
	if :: s == DRAIN || s == STAGE -> lease_holds[op] = true :: else fi;
	answer[0] = NONE; answer[1] = NONE; went_missing[0] = false; went_missing[1] = false
}

/* A wake's gate is closed already. Before, bytes are reserved; after a drain, devices locked: either may say no. */
inline enter_or_withdraw(s)
{
	if
	:: next = s
	:: refusals > 0 -> refusals--; verdict = REJECTED; next = WITHDRAW
	fi
}

/* machine.py: TABLE, and _pass_over where nobody is left to be asked. */
inline advance()
{
	do
	:: sig == NONE -> break
	:: else ->
		if
		:: step == PREFLIGHT && sig == YES && kind[op] == SLEEP -> enter_or_withdraw(DRAIN)
		:: step == PREFLIGHT && sig == YES && kind[op] == WAKE -> enter_or_withdraw(STAGE)
		:: step == DRAIN && sig == YES -> enter_or_withdraw(STAGE)
		:: (step == PREFLIGHT || step == DRAIN) && sig == LOST -> verdict = FAILED; next = WITHDRAW
		:: (step == PREFLIGHT || step == DRAIN) && (sig == NO || sig >= EXPIRED) -> verdict = REJECTED; next = WITHDRAW
#ifdef COMMIT_BEFORE_DECISION
		:: (step == STAGE || step == DOUBT) && sig == YES -> next = COMMIT
		:: step == COMMIT && sig == YES -> next = DECIDE
		:: step == DECIDE && sig == YES -> next = PUBLISH
#else
		:: (step == STAGE || step == DOUBT) && sig == YES -> next = DECIDE
		:: step == DECIDE && sig == YES -> next = COMMIT
		:: step == COMMIT && sig == YES -> next = PUBLISH
#endif
		:: (step == STAGE || step == DOUBT) && sig == LOST -> verdict = FAILED; next = ABORT
		:: step == STAGE && sig == EXPIRED -> next = DOUBT
		:: (step == STAGE && (sig == NO || sig == CANCEL)) || (step == DOUBT && (sig == NO || sig >= EXPIRED)) ->
			verdict = REJECTED; next = ABORT
		:: step == DECIDE && sig == NO -> verdict = REJECTED; next = ABORT
		:: step == PUBLISH && sig == YES -> next = OPEN
		:: step == OPEN && sig == YES -> verdict = SUCCEEDED; next = DONE
		:: (step == COMMIT || step == PUBLISH || step == OPEN) && (sig == LOST || sig == EXPIRED) ->
			verdict = FAILED; next = DONE
		/* Only now it is known that one is gone, and the leader may have opened: it is told once more, for good. */
#ifdef LOST_WITHDRAWALS_END
		:: step == WITHDRAW && sig == LOST -> verdict = FAILED; withdrawn_lost = true; next = DONE
#else
		:: step == WITHDRAW && sig == LOST -> verdict = FAILED; withdrawn_lost = true; next = REOPEN
#endif
		:: step == WITHDRAW && sig != LOST -> next = DONE
		:: step == ABORT && sig == YES -> next = REOPEN
		:: step == ABORT && sig == LOST -> verdict = FAILED; next = REOPEN
		:: step == REOPEN && sig == YES -> next = DONE
		:: (step == ABORT && sig == EXPIRED) || (step == REOPEN && (sig == LOST || sig == EXPIRED)) ->
			verdict = FAILED; next = DONE
		fi;
		enter(next); next = 0;
		if
		:: step != DECIDE && step != DONE && targets == 0 ->
			if :: ans[0] == LOST && ans[1] == LOST -> sig = LOST :: else -> sig = YES fi
		:: else -> sig = NONE
		fi
	od
}

#define ASKED(r)   ((targets & (1 << r)) != 0)
#define PENDING(r) (ASKED(r) && ans[r] == NONE)
#define ONE_SAID(what) ((ASKED(0) && ans[0] == what) || (ASKED(1) && ans[1] == what))

/* Gathering.answer: only a stage is cut short by a no; a commit also counts who was gone before it. */
inline fold()
{
	if
	:: (PENDING(0) || PENDING(1)) && !(step == STAGE && (ONE_SAID(NO) || ONE_SAID(LOST))) -> sig = NONE
	:: else ->
		if
		:: ONE_SAID(LOST) || (step == COMMIT && (ans[0] == LOST || ans[1] == LOST)) -> sig = LOST
		:: else ->
			if
			:: ONE_SAID(NO) -> sig = NO
#ifdef STATUS_TELLS_NO_DIGEST
			:: !ONE_SAID(NO) && step == STAGE && other_plan[1] -> sig = NO
#else
			:: !ONE_SAID(NO) && (step == STAGE || step == DOUBT) && other_plan[1] -> sig = NO
#endif
			:: else -> sig = YES
			fi
		fi
	fi
}

#define CALL_OF_STEP \
	(step == PREFLIGHT -> C_PREFLIGHT : (step == DRAIN -> C_DRAIN : (step == STAGE -> C_STAGE : \
	(step == COMMIT -> C_COMMIT : (step == PUBLISH || step == OPEN -> C_PUBLISH : \
	(verdict == FAILED -> C_ABORT_FOR_GOOD : C_ABORT))))))

inline send(r)
{
	to_send = to_send & ~(1 << r);
	went_missing[r] = false;
	if
	:: !REACHABLE(r)
	:: REACHABLE(r) && !(r == 1 && step == DRAIN) -> under_way[r] = under_way[r] | BIT(CALL_OF_STEP, op, epoch)
	:: REACHABLE(r) && losses > 0 -> losses--; went_missing[r] = true
	fi
}

inline hear(r)
{
	/* In steps that insist a no would be asked again for ever: it would mean that ranks have parted ways. */
	assert(!(INSISTENT && answer[r] == NO));
	if :: step == COMMIT && r == 0 -> stays_closed = !SERVES(0) :: else fi;
	ans[r] = answer[r];
	answer[r] = NONE;
	fold()
}

/* Execution._outcome and Journal.finish. */
inline finish()
{
	if
	:: verdict == SUCCEEDED ->
		assert(was_decided[op]);
		assert(!(frozen && SERVES(0) && REACHABLE(0)));
		assert(parked[0] == (kind[op] == SLEEP) || !REACHABLE(0));
		assert(parked[1] == (kind[op] == SLEEP) || !REACHABLE(1))
	:: verdict == REJECTED ->
		assert(!(frozen && SERVES(0) && REACHABLE(0))); /* nobody is forgotten */
		assert(!has_committed[op] && !is_firm[op]);
		assert(!(REACHABLE(0) && phase[0] != IDLE && current[0] == op + 1));
		assert(!(REACHABLE(1) && phase[1] != IDLE && current[1] == op + 1))
	:: verdict == FAILED ->
		assert(!REACHABLE(0) || !REACHABLE(1)); /* messages alone never cost a model */
		assert(!(withdrawn_lost && REACHABLE(0) && g != G_FAILED)) /* nobody is let in to a model that is lost */
	fi;
	withdrawn_lost = false;
	journal_state[op] = FINISHED;
	if
	:: verdict == FAILED && !was_decided[op] && ans[0] != LOST && ans[1] != LOST ->
		/* A silent rank may have it staged still: in doubt, until it answers or counts as gone. */
		seen[0] = 0; seen[1] = 0;
		step = SETTLE
	:: else ->
		failed = (verdict == FAILED);
		step = REST
	fi;
	lease_holds[op] = failed || step == SETTLE;
	verdict = NONE; ans[0] = NONE; ans[1] = NONE; stays_closed = false
}

inline crash()
{
	crashes--;
	if :: step == DRAIN -> lease_holds[op] = false :: else fi;
	step = DOWN; targets = 0; to_send = 0; verdict = NONE; stays_closed = false;
	ans[0] = NONE; ans[1] = NONE; answer[0] = NONE; answer[1] = NONE;
	went_missing[0] = false; went_missing[1] = false;
	seen[0] = 0; seen[1] = 0;
	if
	:: true
	:: journal_losses > 0 -> journal_losses--;
		journal_state[0] = ABSENT; journal_state[1] = ABSENT;
		journal_decided[0] = false; journal_decided[1] = false;
		is_firm[0] = false; is_firm[1] = false
	fi
}

/* Reconciler._survey: the status call brings the new epoch, and from there on the dead coordinator's calls are refused.
 * Who stays silent for long enough counts as gone. */
inline look(r)
{
	if
	:: REACHABLE(r) ->
		seen[r] = YES;
#ifndef STATUS_TELLS_NO_EPOCH
		heard_epoch[r] = epoch;
#endif
		if
		:: phase[r] != IDLE -> seen_phase[r] = phase[r]; seen_op[r] = current[r]
		:: phase[r] == IDLE && staging[r] -> seen_phase[r] = STAGING; seen_op[r] = staging[r]
		:: else -> seen_phase[r] = IDLE; seen_op[r] = last[r]
		fi;
		if :: r == 0 -> seen_hold = hold :: else fi
	:: else -> seen[r] = LOST
	fi
}

#define SEEN(r, p) (seen[r] == YES && seen_op[r] == op + 1 && seen_phase[r] == p)
#define PAST(r)    (SEEN(r, COMMITTING) || SEEN(r, COMMITTED) || SEEN(r, IDLE))
#define STRAY(r)   (seen[r] == YES && seen_phase[r] != IDLE)
#ifdef GATES_ARE_NOT_ASKED
#define GATE_HELD  false
#else
#define GATE_HELD  (seen[0] == YES && seen_hold != 0 && seen_hold != seen_op[0])
#endif

/* Reconciler._settle_operations, judge.py. */
inline settle()
{
	if
	:: journal_state[0] == RUNNING -> op = 0; sig = YES
	:: journal_state[0] != RUNNING && journal_state[1] == RUNNING -> op = 1; sig = YES
	:: journal_state[0] != RUNNING && journal_state[1] != RUNNING && (STRAY(0) || STRAY(1) || GATE_HELD) ->
		if
		:: STRAY(0) -> op = seen_op[0] - 1
		:: !STRAY(0) && STRAY(1) -> op = seen_op[1] - 1
		:: else -> op = seen_hold - 1
		fi;
		journal_state[op] = RUNNING;
		sig = YES
	:: else -> sig = NONE
	fi;
#ifdef FORGETS_THE_JOURNAL
	journal_decided[op] = false;
#endif
	if
	:: sig == NONE ->
		failed = (seen[0] == LOST || seen[1] == LOST);
		if :: !failed -> assert(parked[0] == parked[1] || !REACHABLE(0) || !REACHABLE(1)) :: else fi;
		lease_holds[0] = failed; lease_holds[1] = failed;
		step = REST
	:: else ->
		if :: seen[0] == LOST -> ans[0] = LOST :: else fi;
		if :: seen[1] == LOST -> ans[1] = LOST :: else fi;
		sig = NONE;
		if
#ifdef ONE_STAGED_IS_ENOUGH
		:: PAST(0) || PAST(1) || (journal_decided[op] && (SEEN(0, STAGED) || SEEN(1, STAGED))) ->
#else
		:: (PAST(0) || PAST(1) || (journal_decided[op] && (SEEN(0, STAGED) || SEEN(1, STAGED))
			&& (SEEN(0, STAGED) || seen[0] == LOST) && (SEEN(1, STAGED) || seen[1] == LOST))) ->
#endif
			journal_decided[op] = true; was_decided[op] = true;
			enter(COMMIT)
		:: else ->
			if :: ans[0] == LOST || ans[1] == LOST -> verdict = FAILED :: else -> verdict = REJECTED fi;
			enter(ABORT);
			if :: targets == 0 -> sig = (ans[0] == LOST && ans[1] == LOST -> LOST : YES) :: else fi
		fi;
		if :: step == COMMIT && targets == 0 -> sig = LOST :: else fi
	fi;
	seen[0] = 0; seen[1] = 0; seen_phase[0] = 0; seen_phase[1] = 0; seen_op[0] = 0; seen_op[1] = 0; seen_hold = 0
}

#define ALL_STAGED (phase[0] == STAGED && current[0] == op + 1 && phase[1] == STAGED && current[1] == op + 1)

inline decide()
{
	/* Ranks that disagree are found before (M7). */
	assert(!(alive[0] && alive[1]) || (ALL_STAGED && !other_plan[1]));
	if
	:: journal_decided[op] = true; was_decided[op] = true; is_firm[op] = true; sig = YES
	:: refusals > 0 -> refusals--; sig = NO
	:: refusals > 0 -> refusals--; journal_decided[op] = true; sig = NO /* told as failed, and there all the same */
	fi
}

proctype coordinator()
{
	byte next;

end:	do
	:: atomic {
		if
		:: (to_send & 1) -> send(0)
		:: (to_send & 2) -> send(1)
		:: PENDING(0) && answer[0] != NONE -> hear(0)
		:: PENDING(1) && answer[1] != NONE -> hear(1)
		:: PENDING(0) && !(to_send & 1) && !alive[0] && answer[0] == NONE -> ans[0] = LOST; fold()
		:: PENDING(1) && !(to_send & 2) && !alive[1] && answer[1] == NONE -> ans[1] = LOST; fold()
	/* Driver._insist: asked again, or asked what has become of it. */
		:: INSISTENT && PENDING(0) && went_missing[0] -> to_send = to_send | 1; went_missing[0] = false
		:: INSISTENT && PENDING(1) && went_missing[1] -> to_send = to_send | 2; went_missing[1] = false
		:: step == DOUBT && PENDING(0) && REACHABLE(0) ->
		ans[0] = (phase[0] == STAGED && current[0] == op + 1 -> YES : NO); fold()
		:: step == DOUBT && PENDING(1) && REACHABLE(1) ->
		ans[1] = (phase[1] == STAGED && current[1] == op + 1 -> YES : NO); fold()
		:: (step <= DOUBT || step == WITHDRAW) && to_send == 0 -> sig = EXPIRED
		:: (INSISTENT && to_send == 0
		&& ((PENDING(0) && silent[0]) || (PENDING(1) && silent[1]))
		&& (!PENDING(0) || !REACHABLE(0)) && (!PENDING(1) || !REACHABLE(1))) -> sig = EXPIRED
		:: step <= DOUBT && refusals > 0 -> refusals--; sig = CANCEL
		:: step == DECIDE -> decide()
		:: step == DONE -> finish()
		:: step == REST && !failed && begun < OPERATIONS -> /* begin */
		op = begun; begun++;
		assert(parked[0] == parked[1] || !REACHABLE(0) || !REACHABLE(1));
		kind[op] = (parked[0] || parked[1] -> WAKE : SLEEP);
		journal_state[op] = RUNNING;
		enter(PREFLIGHT)
	/* CoordinatorActor._watch: the leader of a failed model is told. */
		:: step == REST && failed && REACHABLE(0) && g != G_FAILED -> fail_gate()
		:: crashes > 0 && step < DOWN -> crash()
		:: crashes > 0 && step == REST -> crash()
		:: step == DOWN -> epoch = 1; step = SETTLE
		:: step == SETTLE && !seen[0] -> look(0)
		:: step == SETTLE && !seen[1] -> look(1)
		:: step == SETTLE && seen[0] && seen[1] -> settle()
		fi;
		advance() }
	od
}

/* When nothing is left to happen: no operation without an end, and ranks, gate and journal agree. */
proctype finale()
{
	atomic {
		timeout ->
		assert(step == REST && to_send == 0);
		assert(journal_state[0] != RUNNING && journal_state[1] != RUNNING);
		assert(under_way[0] == 0 && under_way[1] == 0 && !running && draining == 0);
		if
		:: !failed && REACHABLE(0) && REACHABLE(1) ->
			assert(begun == OPERATIONS && phase[0] == IDLE && phase[1] == IDLE && !staging[0] && !staging[1]);
			assert(parked[0] == parked[1] && undefined[0] == undefined[1]);
			assert(hold == 0 && g == (parked[0] -> G_ASLEEP : (undefined[0] -> G_UNDEFINED : G_OPEN)));
			assert(stepping[0] == SERVES(0) && stepping[1] == SERVES(1))
		:: failed ->
			assert(!REACHABLE(0) || !REACHABLE(1));
			assert(g == G_FAILED || !REACHABLE(0))
		:: else
		fi
	}
}

init
{
	atomic {
		if
		:: g = G_OPEN; stepping[0] = true; stepping[1] = true
		:: g = G_ASLEEP; parked[0] = true; parked[1] = true
		fi;
		if :: discards = false :: discards = true fi;
		run rank(0); run rank(1); run door(); run coordinator(); run finale()
	}
}
