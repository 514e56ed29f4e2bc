from data_pipeline.documents import Reason
from data_pipeline.stages.reject_samples import SAMPLES_PER_REASON, Samples


def test_the_first_documents_of_each_reason_are_samples_over_all_batches() -> None:
    samples = Samples()
    rejected = [(row, (Reason.TOO_SHORT, Reason.TOO_LONG)[row % 2]) for row in range(2 * SAMPLES_PER_REASON + 2)]
    taken = [row for start in range(0, len(rejected), 3) for row, _ in samples.wanted(rejected[start : start + 3])]
    assert taken == list(range(2 * SAMPLES_PER_REASON))
