"""Errors travel between processes: those of worker pools and of data loaders."""

from __future__ import annotations

import inspect
import pickle

from zerofx import errors


def test_errors_are_pickled_with_all_they_say() -> None:
    made: list[errors.ZeroFxError] = [
        errors.VerificationError("rule", "problem", "remedy", ["node"]),
        errors.RankGoneError("problem", "remedy", [1]),
    ]
    kinds = [each for _, each in inspect.getmembers(errors, inspect.isclass)]
    usual = [each for each in kinds if issubclass(each, errors.ZeroFxError)]
    made += [each("problem", "remedy", ["node"]) for each in usual if "__init__" not in vars(each)]
    for error in made:
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is type(error)
        assert (str(again), vars(again)) == (str(error), vars(error))
