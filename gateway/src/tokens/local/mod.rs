//! Local tokenizer of a model, with its chat templates and the cache of earlier texts.
//!
//! Tokens are equal with and without the cache: texts are only cut at valid points, and a tokenizer that fails a test
//! on samples runs uncached. Calls for long texts take milliseconds on the calling thread: see [`pool`](super::threads).

use std::path::Path;
use std::sync::Arc;

use parking_lot::Mutex;
use tokenizers::models::ModelWrapper;
use tokenizers::normalizers::NormalizerWrapper;
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{SplitDelimiterBehavior, Tokenizer};

use super::PromptMedia;
use super::cache::{Cache, Keys};
use super::chat::{MediaForm, PROMPT_BYTES_MAX};
use super::chunks::{CHUNK_BYTES_MIN, Chunk, Cutter};
use super::files;
use super::format::ContentFormat;
use super::media::layout::MediaLayout;
use super::media::lengths::MediaLengths;
use super::media::placeholders::Placeholders;
use super::media::{self, Naming, Outline};
use super::meters::TokenMeters;
use super::reason::NoTokens;
use super::template::{Clock, Templates};
use crate::formats::openai::ChatParts;
use words::Words;

mod ascii;
mod words;

/// Maximum length of a text whose fast tokenization costs less than the change to another thread and back.
const QUICK_BYTES_MAX: usize = 4 << 10;

/// Number of special tokens combined with the samples.
const SAMPLED_CUT_TEXTS_MAX: usize = 8;

/// Beginnings of texts that some tokenizers treat specially.
const SAMPLES: [&str; 7] = ["plain text", " a space first", "\n\nlines\n", "  ", "É", "1234 + x_y", "\u{301}combining"];

/// A tokenizer and its resources.
pub(super) struct Local {
    pub(super) tokenizer: Tokenizer,
    /// The fast form of the tokenizer, if it has one.
    words: Option<Words>,
    templates: Templates,
    pub(super) takes_inline_system: bool,
    /// Tokens added before and after plain text; `None` if they depend on the text.
    around: Option<(Vec<u32>, Vec<u32>)>,
    /// The cache; `None` if every text is tokenized as a whole.
    kept: Option<Kept>,
    meters: Arc<TokenMeters>,
    /// Placeholders of media; `None` if prompts with media have no tokens.
    placeholders: Option<Placeholders>,
    lengths: Arc<MediaLengths>,
    /// Longest text of one token, in bytes; `None` if a token may have more text.
    token_bytes_max: Option<usize>,
}

struct Kept {
    cutter: Cutter,
    keys: Keys,
    cache: Mutex<Cache>,
    chunk_bytes_min: usize,
}

impl Local {
    /// Reads the files. Blocks: large tokenizers take a second.
    pub(super) fn load(
        tokenizer_file: &Path,
        chat_template_file: Option<&Path>,
        cache_bytes_max: u64,
        clock: Clock,
        meters: Arc<TokenMeters>,
    ) -> Result<Self, String> {
        let no_tokenizer = |error: tokenizers::Error| files::no_tokenizer(tokenizer_file, &error);
        // `parse` is compiled with its crate; the other constructors are compiled here once more.
        let mut tokenizer: Tokenizer = files::read(tokenizer_file)?.parse().map_err(no_tokenizer)?;
        // Engines disable these settings of the file.
        tokenizer.with_padding(None);
        tokenizer.with_truncation(None).map_err(no_tokenizer)?;
        let sources = files::template_sources(tokenizer_file, chat_template_file)?;
        let path = chat_template_file.unwrap_or(tokenizer_file);
        let unusable = |error: minijinja::Error| files::unusable(path, &format!("the chat template: {error}"));
        let templates = Templates::compile(sources, clock).map_err(unusable)?;
        let around = around(&tokenizer);
        let takes_inline_system = templates.take_inline_system();
        let (placeholders, lengths) = (Placeholders::of(&tokenizer, None), Arc::new(MediaLengths::new()));
        let (token_bytes_max, kept) = (token_bytes_max(&tokenizer), None);
        let mut local = Self {
            words: Words::of(&tokenizer),
            tokenizer,
            templates,
            takes_inline_system,
            around,
            kept,
            meters,
            placeholders,
            lengths,
            token_bytes_max,
        };
        let bytes_max = usize::try_from(cache_bytes_max).unwrap_or(usize::MAX);
        if bytes_max > 0 {
            local.keep(bytes_max, CHUNK_BYTES_MIN);
        }
        Ok(local)
    }

    /// Whether chats can be tokenized.
    pub(super) fn has_template(&self) -> bool {
        !self.templates.is_empty()
    }

    /// Replaces the known image placeholders by this token. Returns false, without any effect, if it is no added token
    /// of the tokenizer.
    pub(super) fn set_placeholder(&mut self, text: &str) -> bool {
        let is_token = self.tokenizer.get_added_vocabulary().get_vocab().contains_key(text);
        if is_token {
            self.placeholders = Placeholders::of(&self.tokenizer, Some(text));
        }
        is_token
    }

    /// Whether texts of this length are tokenized on the threads of requests.
    pub(super) fn is_quick(&self, bytes: usize) -> bool {
        self.words.is_some() && bytes <= QUICK_BYTES_MAX
    }

    /// Whether the cache is in use.
    pub(super) fn is_cached(&self) -> bool {
        self.kept.is_some()
    }

    /// Enables the cache if it is safe for this tokenizer.
    fn keep(&mut self, bytes_max: usize, chunk_bytes_min: usize) {
        let kept = Cutter::of(&self.tokenizer).filter(|cutter| self.cuts_are_safe(cutter)).map(|cutter| Kept {
            cutter,
            keys: Keys::new(),
            cache: Mutex::new(Cache::new(bytes_max)),
            chunk_bytes_min,
        });
        self.kept = kept;
    }

    /// Rejects a text with more than `tokens_max` tokens, by its length.
    pub(super) fn check_length(&self, text: &str, tokens_max: Option<u32>) -> Result<(), NoTokens> {
        let (Some(tokens_max), Some(bytes)) = (tokens_max, self.token_bytes_max) else { return Ok(()) };
        let tokens_min = u32::try_from(text.len().div_ceil(bytes)).unwrap_or(u32::MAX);
        if tokens_min > tokens_max { Err(NoTokens::over_context(tokens_min)) } else { Ok(()) }
    }

    /// Tokens of plain text, including tokens added around it.
    pub(super) fn text(&self, text: &str) -> Result<Vec<u32>, NoTokens> {
        if text.len() > PROMPT_BYTES_MAX {
            return Err(NoTokens::TOO_LONG);
        }
        match &self.around {
            Some((before, after)) => self.encode(text, before, after),
            None => whole(&self.tokenizer, text, true),
        }
    }

    /// Tokens of a conversation. The template adds the surrounding tokens.
    pub(super) fn chat(&self, parts: &ChatParts, tokens_max: Option<u32>) -> Result<Vec<u32>, NoTokens> {
        let rendered = self.templates.render(parts, MediaForm::Rejected)?;
        self.check_length(&rendered, tokens_max)?;
        self.encode(&rendered, &[], &[])
    }

    /// Tokens of a conversation with or without media.
    pub(super) fn conversation(
        &self,
        parts: &ChatParts,
        naming: Naming<'_>,
        tokens_max: Option<u32>,
    ) -> Result<(Vec<u32>, Option<PromptMedia>), NoTokens> {
        if !media::may_occur(parts) {
            return self.chat(parts, tokens_max).map(|ids| (ids, None));
        }
        let Outline { parts, items, names } = Outline::read(parts, naming)?;
        if items.is_empty() {
            return self.chat(&parts, tokens_max).map(|ids| (ids, None));
        }
        let placeholders = self.placeholders.as_ref().ok_or(NoTokens::MULTIMODAL)?;
        let format = self.templates.format_for(&parts)?;
        let rendered = self.templates.render(&parts, MediaForm::Accepted(placeholders.text()))?;
        let template_ids = self.encode(&rendered, &[], &[])?;
        // Templates without parts have the placeholders of each kind together.
        let is_in_order = format == ContentFormat::Parts || items.iter().all(|item| item.kind == items[0].kind);
        let layout = MediaLayout::of(&template_ids, &items, placeholders, is_in_order, &self.lengths);
        let MediaLayout { ids, spans, unknown_from, report } = layout.ok_or(NoTokens::MULTIMODAL)?;
        Ok((ids, Some(PromptMedia { spans, unknown_from, report, names })))
    }

    fn encode(&self, text: &str, before: &[u32], after: &[u32]) -> Result<Vec<u32>, NoTokens> {
        let mut ids = before.to_vec();
        let from_cache = match &self.kept {
            Some(kept) => self.encode_kept(kept, text, &mut ids)?,
            None => {
                ids.extend(self.bare(text)?);
                0
            }
        };
        ids.extend_from_slice(after);
        self.meters.from_cache.increment(from_cache as u64);
        self.meters.tokenized.increment((ids.len() - from_cache) as u64);
        Ok(ids)
    }

    /// Appends the tokens of the text and returns how many came from the cache.
    fn encode_kept(&self, kept: &Kept, text: &str, ids: &mut Vec<u32>) -> Result<usize, NoTokens> {
        let (begin, mut from_cache) = (ids.len(), 0);
        for chunk in kept.cutter.chunks(text, kept.chunk_bytes_min) {
            let key = chunk.is_closed.then(|| kept.keys.of(&text[chunk.at.clone()], chunk.after.is_none()));
            if let Some(known) = key.and_then(|key| kept.cache.lock().get(key)) {
                from_cache += known.len();
                ids.extend_from_slice(&known);
                continue;
            }
            let Some(new) = self.part(text, &chunk)? else {
                // Not observed with any tokenizer: the token before the part is not recognized at its beginning.
                ids.truncate(begin);
                ids.extend(self.bare(text)?);
                return Ok(0);
            };
            if let Some(key) = key {
                let mut cache = kept.cache.lock();
                cache.put(key, &new);
                self.meters.cache_bytes.set(cache.bytes as f64);
            }
            ids.extend(new);
        }
        Ok(from_cache)
    }

    /// Tokens of a text without those around it.
    fn bare(&self, text: &str) -> Result<Vec<u32>, NoTokens> {
        match &self.words {
            Some(words) => words.encode(&self.tokenizer, text).map_err(|_| NoTokens::TOKENIZER_ERROR),
            None => whole(&self.tokenizer, text, false),
        }
    }

    /// Tokens of a part; `None` if the token before it is not the expected one.
    fn part(&self, text: &str, chunk: &Chunk) -> Result<Option<Vec<u32>>, NoTokens> {
        let Some(cut_text) = chunk.after else { return self.bare(&text[chunk.at.clone()]).map(Some) };
        let mut ids = self.bare(&text[cut_text.start..chunk.at.end])?;
        if ids.first() != Some(&cut_text.id) {
            return Ok(None);
        }
        ids.remove(0);
        Ok(Some(ids))
    }

    /// Tokenizes samples with and without cuts, as a defence against tokenizers that [`Cutter`] does not cover.
    fn cuts_are_safe(&self, cutter: &Cutter) -> bool {
        let cut_texts = &cutter.cut_texts[..cutter.cut_texts.len().min(SAMPLED_CUT_TEXTS_MAX)];
        cut_texts.iter().all(|cut_text| {
            SAMPLES.iter().all(|sample| {
                let text = format!("{sample}{cut_text}{sample}{cut_text}{cut_text}\n{sample} {cut_text} {sample}");
                let parts = cutter.chunks(&text, 1).into_iter().map(|chunk| self.part(&text, &chunk));
                let parts: Result<Option<Vec<Vec<u32>>>, NoTokens> = parts.collect();
                let whole = whole(&self.tokenizer, &text, false);
                matches!((parts, whole), (Ok(Some(parts)), Ok(whole)) if parts.concat() == whole)
            })
        })
    }
}

/// Longest text of one token. Known for tokenizers that give each byte to a token: byte-level BPE whose steps before the
/// model remove nothing.
fn token_bytes_max(tokenizer: &Tokenizer) -> Option<usize> {
    let keeps_all = |step: &PreTokenizerWrapper| match step {
        PreTokenizerWrapper::ByteLevel(_) => true,
        PreTokenizerWrapper::Split(split) => split.behavior != SplitDelimiterBehavior::Removed,
        _ => false,
    };
    let is_byte_level = |step: &PreTokenizerWrapper| matches!(step, PreTokenizerWrapper::ByteLevel(_));
    let is_covered = match tokenizer.get_pre_tokenizer()? {
        PreTokenizerWrapper::Sequence(steps) => {
            steps.as_ref().iter().all(keeps_all) && steps.as_ref().iter().any(is_byte_level)
        }
        step => is_byte_level(step),
    };
    let is_complete = || ByteLevel::alphabet().iter().all(|byte| tokenizer.token_to_id(&byte.to_string()).is_some());
    // Composed characters have at least a third of the bytes of their parts.
    let shrinks_by = match tokenizer.get_normalizer() {
        None => 1,
        Some(NormalizerWrapper::NFC(_)) => 3,
        Some(_) => return None,
    };
    let added = tokenizer.get_added_tokens_decoder();
    let takes_spaces = added.values().any(|token| token.lstrip || token.rstrip);
    if !is_covered || !matches!(tokenizer.get_model(), ModelWrapper::BPE(_)) || takes_spaces || !is_complete() {
        return None;
    }
    // A character of the vocabulary is one byte of the text.
    let of_model = tokenizer.get_vocab(false).into_keys().map(|token| token.chars().count()).max()?;
    let of_added = added.values().map(|token| token.content.len()).max().unwrap_or(0);
    Some(of_model.max(of_added) * shrinks_by)
}

fn whole(tokenizer: &Tokenizer, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, NoTokens> {
    // The error may quote the text, so it is counted but not logged.
    let encoding = tokenizer.encode_fast(text, add_special_tokens).map_err(|_| NoTokens::TOKENIZER_ERROR)?;
    Ok(encoding.get_ids().to_vec())
}

/// Tokens that the tokenizer adds around a text, if equal for all samples.
fn around(tokenizer: &Tokenizer) -> Option<(Vec<u32>, Vec<u32>)> {
    let mut found: Option<(Vec<u32>, Vec<u32>)> = None;
    for sample in SAMPLES {
        let (bare, full) = (whole(tokenizer, sample, false).ok()?, whole(tokenizer, sample, true).ok()?);
        let at = (0..=full.len().checked_sub(bare.len())?).find(|at| full[*at..].starts_with(&bare))?;
        let this = (full[..at].to_vec(), full[at + bare.len()..].to_vec());
        if found.get_or_insert_with(|| this.clone()) != &this {
            return None;
        }
    }
    found
}

#[cfg(test)]
mod tests;
