"""What the checks of groups and advantages teach (A3xx)."""

from __future__ import annotations

CREDIT: dict[str, dict[str, str]] = {
    "A301": {
        "what": "A group, whose rewards are the baseline of one another, holds rollouts of different tasks.",
        "why": (
            "The advantage then says which task is easy, not which answer is good. Training moves towards whatever "
            "easy tasks have in common; the mean reward may still rise."
        ),
        "example": (
            "Task A is always solved (1, 1), task B never (0, 0). Right groups give advantage 0 to all. Groups (A, "
            "B), (A, B) give +.71 and -.71: a strong gradient out of nothing."
        ),
        "by_hand": (
            "`for g in groups: assert len(set(task[group == g])) == 1`. Do it after balancing and shuffling, where it"
            " breaks."
        ),
        "mend": (
            "verl: set `uid` from the data row before `repeat(interleave=True)` and carry it through every reorder. "
            "TRL: prompts must come as `num_generations` equal ones in a row. SkyRL: `trajectory_ids` of one instance"
            " share the instance id."
        ),
        "reported": "Search-R1#88; Agent-R1#8; collapses in RAGEN#52, ZeroSearch#23",
    },
    "A302": {
        "what": "Rollouts of one task exist, and each stands in a group of its own.",
        "why": (
            "A group of one has no baseline. Some trainers then give advantage 0 (nothing is learnt), verl's GRPO "
            "gives the raw reward: GRPO has become REINFORCE without a baseline, with rewards of 0 and 1 a method "
            "that only ever pushes up."
        ),
        "example": (
            "Rewards 1, 0, 1, 0 in one group: advantages +.87, -.87, +.87, -.87. In groups of one: 1, 0, 1, 0."
        ),
        "by_hand": "`np.unique(group, return_counts=True)`: the counts must be the number of rollouts a task.",
        "mend": (
            "Make the id from the task, not from the request, the process or the rollout. verl agent loops: one `uid`"
            " for the n copies of a prompt. SkyRL: instance id, not trajectory id. verifiers: group by the example's "
            "id."
        ),
        "reported": "Search-R1#88; Agent-R1#8; Search-R1#92, #162, #175; ConvSearch-R1#6",
    },
    "A303": {
        "what": "Groups have more, or fewer, rollouts than the rule.",
        "why": (
            "More: an id is used twice (by two steps, two workers, two tasks) and two comparisons are mixed. Fewer: "
            "members were dropped, and the statistic with them; over two or three members it is noise."
        ),
        "example": "8 declared, 16 found: step 3 and step 4 both call their first group 0.",
        "by_hand": "`collections.Counter(Counter(group).values())` should have one entry.",
        "mend": (
            "Put step and task into the id. Say why members are missing: an environment error, a filter, a time-out."
        ),
    },
    "A304": {
        "what": (
            "Two rollouts of one group are equal token by token, although the answer is too long or too unlikely for "
            "chance."
        ),
        "why": (
            "Copies add nothing and count twice: the effective group size falls, the std shrinks, and with one seed "
            "for all rollouts of a group every advantage is 0."
        ),
        "example": (
            "Log-probs of an answer sum to -40: the chance to sample it again is exp(-40) = 4e-18. Eight equal "
            "rollouts of it are one rollout."
        ),
        "by_hand": "`len({tuple(ids) for ids in group})` against the group size.",
        "mend": (
            "No fixed seed in the sampling parameters (vLLM's `seed` is per request), no response cache, temperature "
            "above 0, and look for a retry that appends what it had already appended."
        ),
    },
    "A305": {
        "what": "Samples that carry one rollout id stand in several groups, or are of several tasks.",
        "why": (
            "The id is not unique, so statistics per episode mix episodes, or the group id is wrong for a part of the"
            " turns."
        ),
        "example": (
            "Rollout `2` of group 5 and rollout `2` of group 6 under one name: 12 turns of an episode that had 6."
        ),
        "by_hand": "`groupby(rollout)[group].nunique()` must be 1 everywhere.",
        "mend": "Name an episode by step, task and index together.",
    },
    "A311": {
        "what": (
            "Samples have advantage 0 on every trained token although the rewards of their group differ, or although "
            "other samples of the same episode have an advantage."
        ),
        "why": (
            "Step-wise training stores an episode as N samples. If the advantage is written to the last one only, (N "
            "- 1) of N samples teach nothing: the early turns, where tool use is learnt. The loss is finite, the "
            "reward rises a little, and the method looks weak."
        ),
        "example": (
            "An episode of 10 steps with advantage .87: right is .87 on all ten; found is 0 nine times and .87 once. "
            "The gradient is a tenth, all of it about the last step."
        ),
        "by_hand": "`(advantages * mask).any(1)` per sample, beside `reward - mean(reward of its group)`.",
        "mend": (
            "SkyRL: use a version behind PR#1507 (the last step's advantage was masked with the last step's mask, "
            "then copied to the others). verl and verl-agent: broadcast the scalar of the episode, multiplied by each"
            " sample's own `response_mask`."
        ),
        "reported": "SkyRL#1492, PR#1507 ((N-1)/N of the step samples had advantage 0)",
    },
    "A312": {
        "what": "All rewards of a group are equal, and its rollouts have advantages.",
        "why": (
            "Either the baseline is not of this group, or rounding of 1e-7 was divided by a std of 1e-7. Dead groups "
            "are half of all groups in many runs, so this noise is half of the gradient."
        ),
        "example": (
            "Rewards .1 + .2 and .3 in float: std 5e-17. Divided by std + 1e-8 they are harmless, by the std alone "
            "they are about 1."
        ),
        "by_hand": "For groups with `np.ptp(reward) == 0`: `abs(advantage).max()` must be 0.",
        "mend": (
            "Floor the std; set advantages of equal rewards to 0; look at A301 first. A length penalty in the score "
            "is a reason, and is not seen here."
        ),
        "reported": "NeMo-RL#4161, PR#4158 (rounding in the std: an advantage of -2,075)",
    },
    "A313": {
        "what": "One and the same advantage stands on every trained token of every sample.",
        "why": (
            "A constant advantage is no comparison: it raises the log-prob of whatever was sampled, which is entropy "
            "collapse."
        ),
        "example": "All rewards 1 and no baseline: advantage 1 everywhere.",
        "by_hand": "`np.unique(advantages[mask])`.",
        "mend": (
            "Subtract a baseline (group mean, leave-one-out, critic); check that the reward varies at all (A403)."
        ),
    },
    "A314": {
        "what": (
            "GRPO, Dr.GRPO and RLOO give an episode one number, and these advantages differ between tokens or samples"
            " of one episode."
        ),
        "why": (
            "The usual cause is a mask of another sample or shifted by a token: zeros at the end of one answer, an "
            "advantage on the observation behind it. Or a rescaler acts that nobody declared."
        ),
        "example": "`.87 .87 .87 0` on an answer of four tokens: its end token has no advantage.",
        "by_hand": "`advantages[mask].std()` per sample.",
        "mend": (
            "Write the scalar first, then multiply by the sample's own mask. If the method gives credit per token, "
            "declare it: `--declare.estimator own`."
        ),
        "reported": "SkyRL PR#1507 (the last step's mask on every step)",
    },
    "A315": {
        "what": "The sign of the advantage is opposite to reward minus group mean.",
        "why": (
            "The better rollouts of a group are made less likely. If all are flipped the reward falls and it is "
            "found; if few are, it is only slow."
        ),
        "example": (
            "Rewards 1, 0, 0, 0; advantages -1.5, +.5, +.5, +.5: a cost taken for a reward, or an order turned round."
        ),
        "by_hand": "`np.sign(advantage) == np.sign(reward - group_mean)` wherever both are not 0.",
        "mend": (
            "Check that rewards and advantages went through the same reordering, and that a loss is minimised: "
            "-advantage x log-prob."
        ),
    },
    "A316": {
        "what": (
            "The advantages are not what the declared estimator makes of these rewards: GRPO (R - mean) / (std + "
            "epsilon) with either divisor of the std, Dr.GRPO R - mean, RLOO R - mean of the others, REINFORCE++ "
            "whitened over the batch. Undeclared, it is the estimator that four fifths of the file follow."
        ),
        "why": (
            "An estimator in name only is a different method. Common ones: each turn counted instead of each episode,"
            " so long episodes set the baseline; the std taken over the batch; the std twice; the mean of another "
            "group."
        ),
        "example": (
            "Episodes with rewards 1 (2 turns) and 0 (8 turns). Counted once each the mean is .5; counted by turns it"
            " is .2, and the success gets +.8 where the failure gets -.2."
        ),
        "by_hand": "`(r - r.mean()) / (r.std(ddof=1) + 1e-6)` of one group, on paper, beside the column.",
        "mend": (
            'verl: `norm_adv_by_std_in_grpo` decides between GRPO and Dr.GRPO. TRL: `scale_rewards` ("group", '
            '"batch", "none"). SkyRL step-wise: estimate on last steps only, then broadcast. A KL or length term in '
            "the reward must be in `score`."
        ),
        "reported": "SkyRL#1278; verl-agent (step rows averaged over the batch)",
    },
}
