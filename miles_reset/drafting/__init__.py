"""Draft the schema of an optimizer from what it does, and hold the draft to the law.

::

    from miles_reset.drafting import draft_schema

    drafted = draft_schema(MyOptimizer, variants={"lr=0.1": partial(MyOptimizer, lr=0.1)})
    print(drafted)
    drafted.schema

A small model is stepped under observation: what each key of the state, of the groups and of the
attributes holds when it is first there, and whether that follows the gradients, the weights, a number
of the group or one that the constructor was given. From this come the words that may be true of a key,
in-place words first; which of them are true, the law decides.
"""

from miles_reset.drafting.drafted import Decision, Drafted
from miles_reset.drafting.drafter import draft_schema
from miles_reset.drafting.stepping import InTrainMode, WithClosure, WithGraph

__all__ = ["Decision", "Drafted", "InTrainMode", "WithClosure", "WithGraph", "draft_schema"]
