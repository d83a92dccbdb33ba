"""Planted bugs of everything that follows a fault: fail-over, breakers, drains, the controller."""

from dataclasses import replace

from paceline.controller.registry import Registry
from paceline.gateway.failover import Failover
from paceline.generation import Resumption
from paceline.target.breaker import Breaker, Breakers
from paceline.target.draft_desk import DraftDesk
from paceline.target.endings import engine_error
from paceline.target.intake import Intake
from paceline.target.roster import Roster
from paceline.target.scheduler import Scheduler
from paceline.testing.simulated_gateway import SimulatedGateway
from paceline.testing.simulated_target import SimulatedTarget
from paceline.testing.world import Parts

# -- fail-over ------------------------------------------------------------------------------


class ChangesOutputs(Failover):
    """What the next target is told differs from what the client has."""

    @staticmethod
    def change(output):
        return output

    def _resumption(self):
        resumption = super()._resumption()
        if resumption is None:
            return None
        outputs = [None if o is None else self.change(o) for o in resumption.outputs]
        return replace(resumption, outputs=tuple(outputs))


class ResumesOneEarly(ChangesOutputs):
    @staticmethod
    def change(output):
        return output[:-1]


class ResumesOneLate(ChangesOutputs):
    @staticmethod
    def change(output):
        return (*output, *output[-1:])


class StartsAgain(Failover):
    """The next target knows nothing of what the client has."""

    def _resumption(self):
        return None


class RunsEndedChoicesAgain(Failover):
    def _resumption(self):
        resumption = super()._resumption()
        if resumption is None:
            return None
        outputs = (tuple(output) for output in self._outputs)
        return Resumption(resumption.attempt, tuple(outputs))


class GivesUpAtOnce(Failover):
    def next_try(self, error):
        return None


class SuspectsNobody(Failover):
    """What kills its target goes on to the next, and the next."""

    def next_try(self, error):
        self._num_suspect_failures = 0
        return super().next_try(error)


class CountsRoundsAgain(Failover):
    def receive(self, delta):
        super().receive(delta)
        return delta


class ListensToTheDead(SimulatedGateway):
    """What a given-up target still says goes to the client, too."""

    def _is_heard(self, channel, item):
        return channel.is_open or isinstance(item, list)


class SaysNothing(SimulatedTarget):
    """A request that waits does not hear that its target lives."""

    def _say_alive_later(self, answers):
        pass


# -- a resumed request at its target --------------------------------------------------------


class WithIntake(Scheduler):
    intake = Intake

    def __init__(self, *args):
        super().__init__(*args)
        self.intake.__class__ = self.intake


class OldNoise(Intake):
    def _seed(self, request):
        return request.sampling.seed


class ReusesRejectionNoise(WithIntake):
    intake = OldNoise


class CountsOutputFromTheResumption(Scheduler):
    """Noise of a resumed choice begins at index 0 again."""

    def _entry(self, sequence, start, max_rows, draft):
        entry = super()._entry(sequence, start, max_rows, draft)
        resumption = sequence.request.resumption
        if resumption is None:
            return entry
        num_resumed = len(resumption.outputs[sequence.choice])
        index = entry.item.output_index - num_resumed
        return replace(entry, item=replace(entry.item, output_index=index))


class OutputBecomesPrompt(Intake):
    """Penalties and min_tokens forget what was written before."""

    def _sequence(self, request, session_id, choice, log, output):
        sequence = super()._sequence(request, session_id, choice, log, output)
        sequence.session.prompt_len += len(output)
        return sequence


class TakesResumedOutputForPrompt(WithIntake):
    intake = OutputBecomesPrompt


class ImpatientRoster(Roster):
    def _stop_waiting(self, sequence):
        pass


class TimesOutPreempted(Scheduler):
    """The limit of the queue hits who has had a place and lost its KV."""

    def __init__(self, *args):
        super().__init__(*args)
        self._roster.__class__ = ImpatientRoster


# -- a failing engine -----------------------------------------------------------------------


class BlamesTheBatch(Scheduler):
    def fail_pass(self, plan):
        ended = super().fail_pass(plan)
        left = [entry.session_id for entry in plan.entries if entry.session_id in self._sequences]
        for session_id in left:
            self._retire(session_id)
        return ended + [(session_id, engine_error()) for session_id in left]


class SuspectsShareAPass(Scheduler):
    def _take_turns(self, runnable):
        return runnable


class TellsOnlyThePass(Scheduler):
    """Who waits when the engine breaks never hears of it."""

    def break_pass(self, plan):
        in_pass = {entry.session_id for entry in plan.entries}
        return [ending for ending in super().break_pass(plan) if ending[0] in in_pass]


# -- drafts ---------------------------------------------------------------------------------


class WithDesk(Scheduler):
    desk = DraftDesk

    def __init__(self, *args):
        super().__init__(*args)
        self.drafts.__class__ = self.desk


class StayingDesk(DraftDesk):
    def _move(self, sequence, now_us):
        pass


class StaysOnDrainingDrafts(WithDesk):
    desk = StayingDesk


class WithBreaker(Scheduler):
    breaker = Breaker

    def __init__(self, *args):
        super().__init__(*args)
        self.drafts.pool._breakers.__class__ = type(
            "Planted", (PlantedBreakers,), {"breaker": self.breaker}
        )


class PlantedBreakers(Breakers):
    breaker = Breaker

    def get(self, replica_id):
        breaker = super().get(replica_id)
        breaker.__class__ = self.breaker
        return breaker


class NeverTrips(Breaker):
    def fail(self, session_id, now_us):
        return False


class BreakerNeverOpens(WithBreaker):
    breaker = NeverTrips


class NeverForgives(Breaker):
    def keep(self, now_us):
        return False


class BreakerNeverCloses(WithBreaker):
    breaker = NeverForgives


class ForgetsStreams(Registry):
    """A new controller takes away streams to targets that it has not heard of."""

    def report_draft(self, report, now_s):
        return super().report_draft(replace(report, connected=()), now_s)


BUGS = {
    "resumes one token early": Parts(failover=ResumesOneEarly),
    "resumes one token late": Parts(failover=ResumesOneLate),
    "sends the whole request again": Parts(failover=StartsAgain),
    "runs ended choices again": Parts(failover=RunsEndedChoicesAgain),
    "gives up at once": Parts(failover=GivesUpAtOnce),
    "suspects nobody": Parts(failover=SuspectsNobody),
    "counts rounds again": Parts(failover=CountsRoundsAgain),
    "a zombie's deltas count": Parts(gateway=ListensToTheDead),
    "no sign of life": Parts(target=SaysNothing),
    "reuses rejection noise": Parts(scheduler=ReusesRejectionNoise),
    "resumed output has index 0": Parts(scheduler=CountsOutputFromTheResumption),
    "resumed output is prompt": Parts(scheduler=TakesResumedOutputForPrompt),
    "queue time-out hits preempted": Parts(scheduler=TimesOutPreempted),
    "a batch fails for one": Parts(scheduler=BlamesTheBatch),
    "suspects share a pass": Parts(scheduler=SuspectsShareAPass),
    "a broken engine tells only its pass": Parts(scheduler=TellsOnlyThePass),
    "stays on draining drafts": Parts(scheduler=StaysOnDrainingDrafts),
    "breaker never opens": Parts(scheduler=BreakerNeverOpens),
    "breaker never closes": Parts(scheduler=BreakerNeverCloses),
    "controller forgets streams": Parts(registry=ForgetsStreams),
}
