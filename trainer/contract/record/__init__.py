"""Record of a run: event schema, event writer and the layout of the run directory.

Torch-free: the console reads with the same definitions with which the ranks write.
"""

from __future__ import annotations

from trainer.contract.record.checkpoints import (
    checkpoint_to_resume as checkpoint_to_resume,
    recorded_checkpoints as recorded_checkpoints,
)
from trainer.contract.record.code_stacks import (
    CodeFrame as CodeFrame,
    Collective as Collective,
    RankStacks as RankStacks,
    ThreadStack as ThreadStack,
)
from trainer.contract.record.collective_groups import (
    MAX_GROUPS as MAX_GROUPS,
    OTHER_GROUPS as OTHER_GROUPS,
    CollectiveCall as CollectiveCall,
    GroupSync as GroupSync,
)
from trainer.contract.record.events import (
    SINGLE_VALUES as SINGLE_VALUES,
    Checkpoint as Checkpoint,
    Checksum as Checksum,
    CollectiveGroup as CollectiveGroup,
    Doing as Doing,
    Event as Event,
    Failure as Failure,
    Finding as Finding,
    Joining as Joining,
    Lost as Lost,
    Metrics as Metrics,
    ModelFlops as ModelFlops,
    NoiseScale as NoiseScale,
    Queued as Queued,
    RankState as RankState,
    RankStateName as RankStateName,
    RunEnded as RunEnded,
    RunStarted as RunStarted,
    RunStatusName as RunStatusName,
    Sample as Sample,
    ShareChange as ShareChange,
    Step as Step,
    TrainingPlan as TrainingPlan,
    Unheard as Unheard,
    Validation as Validation,
    World as World,
)
from trainer.contract.record.json_lines import (
    AnyEvent as AnyEvent,
    decode_events as decode_events,
    encode_event as encode_event,
)
from trainer.contract.record.machine_samples import (
    GpuSample as GpuSample,
    NodeSample as NodeSample,
    RankSample as RankSample,
)
from trainer.contract.record.numbers import MAX_RANKS as MAX_RANKS
from trainer.contract.record.run_dir import (
    NATIVE as NATIVE,
    RunDir as RunDir,
    create_atomically as create_atomically,
    read_stack_request as read_stack_request,
    write_atomically as write_atomically,
)
from trainer.contract.record.step_expansion import (
    mean_samples as mean_samples,
    samples_of_each as samples_of_each,
    single_steps as single_steps,
)
from trainer.contract.record.writer import EventWriter as EventWriter
