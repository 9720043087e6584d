//! Questions about long documents: each reading asks several independent questions about one document.
//!
//! A prompt is a document and a question; earlier questions and answers are not part of it. Readings start
//! independently of each other. The questions of a reading follow each other after a gap that is fixed in advance.

use super::settings::{
    Checked, assert_checked, check_count, check_lengths, check_rate, check_requests, check_skew, settings,
};
use super::sources::{Arrival, Popularity, Texts};
use super::{Span, workload};
use crate::workload::{Arrivals, Request, Rng, Workload};

settings! {
    /// Settings of the documents workload.
    pub struct Documents {
        /// Mean requests per second while readings start. Readings start at this rate divided by the mean of `questions`.
        /// 4.
        pub rate: f64 = 4.0,
        /// Number of readings. 400.
        pub readings: u32 = 400,
        /// Questions per reading. 2-10.
        pub questions: Span = (2..=10).into(),
        /// Number of documents. 200.
        pub documents: u32 = 200,
        /// Popularity skew of the documents: 0 uniform, 1 Zipf's law, 2 steeper, with 61 % of the readings for one document.
        /// 1.
        pub skew: u32 = 1,
        /// Length of a document. 5000-40000.
        pub document_tokens: Span = (5_000..=40_000).into(),
        /// Length of a question. 20-200.
        pub own_tokens: Span = (20..=200).into(),
        /// Length of an answer. 50-300.
        pub output_tokens: Span = (50..=300).into(),
        /// Gap between two questions of a reading in ms. 5000-60000.
        pub gap_ms: Span = (5_000..=60_000).into(),
    }
}

impl Documents {
    pub(super) fn check(&self) -> Checked {
        let Self { readings, questions, documents, skew, document_tokens, own_tokens, output_tokens, .. } = *self;
        check_rate(self.rate)?;
        check_requests("readings and questions", &[readings, questions.max()])?;
        check_count("questions", questions.min())?;
        check_count("documents", documents)?;
        check_skew(skew)?;
        check_lengths(&[("output_tokens", output_tokens, 1)], 1)?;
        check_lengths(&[("document_tokens", document_tokens, 1), ("own_tokens", own_tokens, 1)], 1)
    }

    /// Generates the workload for `seed`.
    ///
    /// # Panics
    /// A setting is out of its bounds.
    #[must_use]
    pub fn generate(&self, seed: u64) -> Workload {
        assert_checked(self.check());
        let (mut rng, mut texts) = (Rng::stream(seed, 0), Texts::new(seed, "documents"));
        let documents: Vec<_> = (0..self.documents).map(|_| texts.fresh(self.document_tokens.draw(&mut rng))).collect();
        let popularity = Popularity::new(self.documents, self.skew);
        let mut opened = Arrival::at_rate(self.rate / self.questions.mean());
        let mut requests = Vec::new();
        for session in 0..u64::from(self.readings) {
            let mut arrival_us = opened.next_us(&mut rng);
            let document = documents[popularity.draw(&mut rng)];
            for _ in 0..self.questions.draw(&mut rng) {
                let prompt = vec![document, texts.fresh(self.own_tokens.draw(&mut rng))];
                let output_tokens = self.output_tokens.draw(&mut rng);
                requests.push(Request { arrival_us, prompt, output_tokens, session: Some(session) });
                arrival_us += 1_000 * u64::from(self.gap_ms.draw(&mut rng));
            }
        }
        workload("documents", requests, Arrivals::OpenLoop)
    }
}
