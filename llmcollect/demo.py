"""The run behind `make collect` and the defaults of the flow: small tasks that a 135M model sometimes gets right."""

from llmcollect.components import ComponentSpec, EnvSpec
from llmcollect.run import RunSpec, Sampling

_ENV = "llmcollect.envs:ReasoningGymEnv"

DEMO_RUN = RunSpec(
    envs=(
        EnvSpec(
            name="chain_sum",
            target=_ENV,
            kwargs={"dataset": "chain_sum", "min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
        ),
        EnvSpec(name="gcd", target=_ENV, kwargs={"dataset": "gcd", "min_value": 2, "max_value": 12}),
    ),
    policies=(ComponentSpec(name="smollm2", target="llmcollect.policies:VLLMPolicy", kwargs={"model": "smollm2"}),),
    num_groups=16,
    group_size=4,
    num_shards=2,
    sampling=Sampling(max_tokens=128, temperature=0.7),
)
