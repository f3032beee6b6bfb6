"""Environments in threads of this process: for those that are quick, or wait for something elsewhere."""

import copy
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from ..runtime.usercode.calls import BackgroundLoop, describe_error, masked
from ..runtime.usercode.surroundings import enter_again, lent_streams, on_device_of_caller, say_once
from .environments import (
    LOOP,
    Action,
    EnvironmentFactory,
    EnvironmentFailure,
    EnvironmentHost,
    HeldEnvironment,
    Observation,
    StepResult,
)

R = TypeVar("R")
AT_ONCE = 64  # calls that run beside each other; those that overran their time are not counted
LOOPS = 32  # of coroutines: one that blocks holds up every 32nd episode; each takes a thread and three open files


class ThreadHost(EnvironmentHost):
    """An `EnvironmentHost` with a thread for each call. A call that overruns its time is left alone: a thread cannot be
    ended, so its episode fails and the thread goes on until the environment returns. A reusable environment whose
    episode ended well begins the next one.

    make: the environment of an episode. seconds: of one reset or step. first: a reusable one that is there already.
    """

    def __init__(self, make: EnvironmentFactory, seconds: float, first: Any = None) -> None:
        self.make, self.seconds = make, seconds
        self._open: set[int] = set()  # episodes that are not ended
        self._environments: dict[int, HeldEnvironment] = {}
        self._asked: dict[int, Future] = {}  # the latest call of each episode
        # On the loop of all users' coroutines, which is that of its making.
        self._idle = [] if first is None else [HeldEnvironment(lambda: first)]
        self._room = threading.BoundedSemaphore(AT_ONCE)
        self._loops = [BackgroundLoop(LOOP) for _ in range(LOOPS)]
        self._folder = os.getcwd()  # of the run, where it finds and leaves its files
        self._streams = lent_streams()  # for as long as there are environments, which run beside all else
        next(self._streams)

    def reset(self, episode: int, row: dict[str, Any]) -> Future[Observation | None]:
        def begin() -> Observation | None:
            try:
                held = self._idle.pop()
            except IndexError:
                held = HeldEnvironment(self.make, self._loops[episode % LOOPS])
            self._environments[episode] = held
            if episode not in self._open:  # given up while it was made
                self._end(episode)
                return None
            return held.reset(copy.deepcopy(row))  # whatever it does to the row's images and messages is its own

        self._open.add(episode)
        return self._call_of(episode, "reset", begin)

    def step(self, episode: int, action: Action) -> Future[StepResult]:
        held = self._environments[episode]
        return self._call_of(episode, "step", lambda: held.step(action))

    def end(self, episode: int) -> None:
        self._end(episode)

    def _end(self, episode: int) -> Future[None] | None:
        self._open.discard(episode)
        held, asked = self._environments.pop(episode, None), self._asked.pop(episode, None)
        if held is not None and held.reusable and asked is not None and asked.done() and asked.exception() is None:
            self._idle.append(held)
            return None
        return None if held is None else self._call("close", held.close)

    def close(self) -> None:
        ended = [self._end(episode) for episode in list(self._open)]
        idle = [self._call("close", held.close) for held in self._idle]
        wait([*filter(None, ended), *idle], self.seconds)
        for loop in self._loops:
            loop.close()
        if said := next(self._streams, None):
            say_once(f"an environment {said}")

    def _in_folder(self, function: Callable[[], R]) -> R:
        """What the function gives; the run is in its folder afterwards."""
        try:
            return function()
        finally:
            if enter_again(self._folder):
                say_once("an environment changes the working directory")

    def _call_of(self, episode: int, what: str, function: Callable[[], R]) -> Future[R]:
        self._asked[episode] = future = self._call(what, function)
        return future

    def _call(self, what: str, function: Callable[[], R]) -> Future[R]:
        """The function in a thread, with its time limit; the time begins when there is room for it."""
        future: Future[R] = Future()
        future.set_running_or_notify_cancel()
        decided = threading.Lock()

        def decide(result: R | None, error: BaseException | None) -> None:
            with decided:
                if future.done():
                    return
                self._room.release()
                if error is None:
                    future.set_result(result)
                else:
                    future.set_exception(error)

        def late() -> None:
            decide(None, EnvironmentFailure(f"{what} took longer than env_timeout = {self.seconds:g} seconds"))

        def run() -> None:
            self._room.acquire()
            timer = threading.Timer(self.seconds, late)
            timer.daemon = True
            timer.start()
            try:
                decide(self._in_folder(function), None)
            except EnvironmentFailure as error:
                decide(None, error)
            except BaseException as error:  # whatever a user's code raises, SystemExit included
                decide(None, EnvironmentFailure(masked(f"{what} {describe_error(error)}")))
            finally:
                timer.cancel()

        threading.Thread(target=on_device_of_caller(run), name=f"environment-{what}", daemon=True).start()
        return future
