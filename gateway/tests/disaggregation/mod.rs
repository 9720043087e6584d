//! Models with a prefill pool and a decode pool, over mock engines that check the rules of each protocol.
//!
//! Rules of the protocols that are easy to miss, and the test that fails without each. `handover` are the unit tests of
//! `gateway/src/handover`. Each was checked once by disabling the rule in the gateway.
//!
//! | rule | test |
//! |---|---|
//! | both legs have the request id, and the header of their data-parallel rank | `both_legs_have_the_request_id_and_a_rank` |
//! | a prefill leg is not streamed, without `stream_options` | `handover`: `nixl_prefill_legs_have_one_token_and_are_not_streamed` |
//! | one token in the spelling of the client, both spellings, and that of responses; `min_tokens`, `n` | the same |
//! | parameters verbatim, unknown fields too | `handover`: `nixl_decode_legs_copy_the_parameters_of_the_prefill_response` |
//! | no parameters: the plain body | `prompts_shorter_than_a_block_are_computed_again` |
//! | parameters of an aborted prefill are not used | `handover`: `nixl_decode_legs_without_parameters_are_the_client_body` |
//! | cached tokens are those of the prefill leg | `every_protocol_serves_in_two_legs` |
//! | `n`, `echo`, `prompt_logprobs` have one leg | `handover`: `requests_that_need_one_rank_are_not_split` |
//! | the booking of the prefill ends with it | `clients_that_leave_during_the_output_end_the_decode_leg` |
//! | a client that leaves cancels the prefill leg | `clients_that_leave_during_the_prefill_end_both_legs` |
//! | a failed prefill: another rank, then the decode rank, named in header and metric | `a_failed_prefill_rank_is_replaced_by_another`, `without_a_working_prefill_rank_the_decode_rank_serves_or_the_error_is_named` |
//! | an error about the request itself is final | `a_request_that_the_prefill_engine_rejects_has_no_decode_leg` |
//! | short uncached prompts skip the prefill leg | `prompts_cached_on_the_decode_rank_skip_the_prefill_leg` |
//! | P2P NCCL: the request id has both addresses | `every_protocol_serves_in_two_legs` |
//! | Mooncake: one transfer id; the engine id of the present incarnation | `handover`: `mooncake_legs_use_the_same_transfer_id`, `restarted_prefill_engines_serve_again` |
//! | SGLang: both legs at once | `every_protocol_serves_in_two_legs` |
//! | SGLang: one room, on the booked rank, and one for each prompt | `handover`: `sglang_legs_have_the_same_room`, `rooms_belong_to_the_rank`, `sglang_batches_have_one_room_for_each_prompt_on_the_same_rank` |
//! | SGLang: ranks of both legs | `handover`: `sglang_legs_name_their_ranks` |
//! | SGLang: a failed leg cancels the other | `a_failed_leg_aborts_the_other` |
//! | SGLang: an abort waits for the hand-over | `clients_that_leave_during_the_prefill_end_both_legs` |
//! | SGLang: `/abort_request` | `a_client_that_leaves_before_a_whole_response_aborts_the_decode_leg_after_the_hand_over` |
//! | SGLang: probabilities of the prompt | `probabilities_of_the_prompt_are_those_of_the_prefill_leg` |
//! | SGLang: a decode engine cannot serve alone | `without_a_working_prefill_rank_the_decode_rank_serves_or_the_error_is_named` |
//! | TensorRT-LLM: `generation_only`, the prompt as token ids | `handover`: `tensorrt_legs_replace_prompt_and_parameters` |
//! | TensorRT-LLM: a context leg that ends the request | `a_complete_context_leg_is_the_whole_response` |
//! | a worker of both pools never transfers to itself | `a_worker_of_both_pools_never_transfers_to_itself` |
//! | picker: `x-prefiller-host-port` | `picker::picks::a_prefill_worker_is_named_for_the_sidecar_until_the_response_starts` |

use pointsman_gateway::formats::handover::Protocol;

use pools::{BLOCK_SIZE, Pools, Size, alone, completion};

mod drill;
mod failures;
mod leaving;
mod pools;
mod requests;
mod roles;
mod sglang;

const SMALL: Size = Size { prefills: 2, decodes: 2, ranks: 1 };

/// Ranks of one engine that a protocol can address.
fn ranks(protocol: Protocol) -> u16 {
    if protocol == Protocol::VllmP2pNccl { 1 } else { 2 }
}

fn prompt(seed: u32, blocks: u32) -> Vec<u32> {
    (0..blocks * BLOCK_SIZE + 3)
        .map(|n| 1 + (n.wrapping_mul(2_654_435_761).wrapping_add(seed * 7_919)) % 30_000)
        .collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_protocol_serves_in_two_legs() {
    let prompts: Vec<_> = (0..12).map(|seed| prompt(seed, 4 + seed % 5)).collect();
    let expected = alone(&prompts, 9).await;
    for protocol in Protocol::ALL {
        let pools = Pools::start(protocol, Size { ranks: ranks(protocol), ..SMALL }, |_| {}).await;
        for (n, prompt) in prompts.iter().enumerate() {
            let answer = pools.complete(prompt, 9, n % 2 == 0).await;
            assert_eq!(answer.status, 200, "{protocol}: {}", answer.text());
            assert_eq!(answer.header("x-pointsman-prefill"), Some("remote"), "{protocol}");
            let (text, cached) = completion(&answer);
            assert_eq!((&text, cached), (&expected[&n], Some(0)), "{protocol}: transferred blocks are not cached ones");
        }
        pools.at_rest().await;
        let count = prompts.len() as u64;
        assert_eq!(Pools::sum(&pools.prefills, |sums| sums.legs_prefill), count, "{protocol}");
        assert_eq!(Pools::sum(&pools.decodes, |sums| sums.legs_decode), count, "{protocol}");
        for engines in [&pools.prefills, &pools.decodes] {
            assert_eq!(Pools::sum(engines, |sums| sums.rejected + sums.aggregated + sums.late_or_unknown), 0);
        }
        let held = Pools::sum(&pools.prefills, |sums| sums.blocks_held_total);
        let claimed = Pools::sum(&pools.prefills, |sums| sums.blocks_claimed_total);
        assert!(held > 0 && held == claimed, "{protocol}: {claimed} of {held} blocks claimed");
        assert_eq!(pools.prefills("remote").await, count, "{protocol}");
    }
}
