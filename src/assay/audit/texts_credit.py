"""Texts of the checks on groups and advantages (A3)."""

from __future__ import annotations

CREDIT: dict[str, dict[str, str]] = {
    "A301": {
        "what": "Rollouts of different tasks share one group.",
        "why": "The baseline compares an easy task with a hard one: rollouts are praised for the task they got.",
        "example": "Group ids counted per worker: group 3 of worker 0 and group 3 of worker 1 are two tasks.",
        "by_hand": "For each group id, the number of distinct prompts must be 1.",
        "mend": "Name a group by its task instance and step, in one place; verl: uid per prompt before the batch is repeated.",
        "reported": "Search-R1 #88, Agent-R1 #8.",
    },
    "A302": {
        "what": "The rollouts of one task are spread over groups of one.",
        "why": "A group of one has no baseline: GRPO has become REINFORCE. verl gives such a sample its raw reward as advantage.",
        "example": "A new uid for every rollout: eight groups of one, advantages 1 0 0 1 ... never negative.",
        "by_hand": "The sizes of the groups; all 1 is the fault.",
        "mend": "Make the id before the prompt is repeated, not after.",
        "reported": "Search-R1 #88, Agent-R1 #8; collapses in RAGEN #52, ZeroSearch #23.",
    },
    "A303": {
        "what": "Groups of another size than the rule.",
        "why": "Lost rollouts (a crash, a time-out) move the baseline; added ones are duplicates or retries.",
        "example": "7 of 8: one rollout crashed. 16 of 8: the batch was repeated twice.",
        "by_hand": "A histogram of group sizes.",
        "mend": "Account for every rollout: kept, or dropped with its reason.",
    },
    "A304": {
        "what": "The same rollout stands twice in a group.",
        "why": "It is counted twice in the baseline and trained twice. Often a seed that is the same for all workers.",
        "example": "Seed 42 in every request: eight identical answers, deviation 0, no signal.",
        "by_hand": "Compare the ids of a group's rollouts. Short answers repeat by chance; long ones do not.",
        "mend": "A seed per rollout; check that a retry replaces and does not add.",
    },
    "A305": {
        "what": "Samples of one episode are in several groups, or of several tasks.",
        "why": "The episode's turns are then compared with unlike things; its reward is counted in two baselines.",
        "example": "Ids by position in the batch, and the batch was sorted by length in between.",
        "by_hand": "For each rollout id, the number of distinct groups must be 1.",
        "mend": "Carry the group with the episode; never derive it from a position.",
    },
    "A311": {
        "what": "Samples have advantage 0 although the rewards of their group differ.",
        "why": "They are paid for and learn nothing. With steps as samples, all but the last of an episode may be such.",
        "example": "Ten step samples an episode, the advantage written to the last one only: nine tenths of the data are silent.",
        "by_hand": "Among groups with unlike rewards, count the samples whose advantages are all 0.",
        "mend": "Give an episode's advantage to each of its samples; take the statistics over episodes, each counted once.",
        "reported": "SkyRL #1492, PR #1507: a fraction (N - 1) / N of the step samples.",
    },
    "A312": {
        "what": "An advantage that is not 0 in a group whose rewards are all equal.",
        "why": "There is nothing to prefer. It is rounding divided by a deviation near 0, or the raw reward.",
        "example": "Rewards that differ by 1e-7, from rounding: with an epsilon of 1e-6 their advantages are up to 0.07.",
        "by_hand": "Largest minus smallest reward at most 1e-6: all advantages must be 0.",
        "mend": "Test the spread, not the deviation, and put a floor under the deviation.",
        "reported": "NeMo-RL #4161 (an advantage 4,000 times too large).",
    },
    "A313": {
        "what": "One advantage for all samples.",
        "why": "The gradient then only makes everything sampled more, or less, likely.",
        "example": "All 1.0: the column was initialised and never written.",
        "by_hand": "The set of advantages.",
        "mend": "Find who should have written them.",
    },
    "A314": {
        "what": "Advantages differ inside an episode where the declared estimator gives one number for all of it.",
        "why": "Either the estimator is another one (GAE, a step-level one) and the declaration is wrong, or columns have slipped.",
        "example": "grpo declared, advantages 0.7 0.7 0.7 0.1.",
        "by_hand": "Largest minus smallest advantage per episode.",
        "mend": "Declare what it is, or mend the broadcast.",
    },
    "A315": {
        "what": "Advantages whose sign is opposite to reward minus group mean.",
        "why": "Successes are pushed down. Training gets worse, steadily, and looks like a learning rate too high.",
        "example": "Reward 1 in a group of mean 0.25 with advantage -1.5: loss and advantage were both negated.",
        "by_hand": "sign(advantage) against sign(reward - mean) per sample.",
        "mend": "One sign, in the loss.",
    },
    "A316": {
        "what": "Advantages that the declared estimator does not give for these rewards.",
        "why": "Biased or unbiased deviation, an epsilon, a batch in place of a group, rows in place of episodes: each is another algorithm than the paper's.",
        "example": "Rewards 1 0 0 1: GRPO gives +-0.866 with n - 1 and +-1 with n; RLOO gives +-0.667; Dr. GRPO +-0.5.",
        "by_hand": "Recompute one group with a pocket calculator.",
        "mend": "Say which one is meant; count each episode once, whatever its number of rows.",
    },
}
