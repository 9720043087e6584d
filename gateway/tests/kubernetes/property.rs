//! After any sequence of changes, expired versions, disconnections and outages, the workers are the pods of the API
//! server.

use std::collections::BTreeMap;

use serde_json::json;

use crate::common::directory::Directory;

use super::api_server::ApiServer;
use super::cluster::{TestPod, WatchingGateway, Workers, engines, settings};

/// Sequences at a time, each in its own namespace.
const SEQUENCES: usize = 6;

/// Changes of each sequence.
const CHANGES: usize = 60;

/// Changes between two comparisons.
const COMPARED_EVERY: usize = 15;

/// SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, limit: usize) -> usize {
        usize::try_from(self.next() % limit as u64).expect("below a usize")
    }

    fn is_one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }
}

/// The pods of one namespace, as the API server has them.
struct Namespace {
    name: String,
    pods: BTreeMap<String, TestPod>,
    next_uid: u64,
    random: Random,
}

impl Namespace {
    fn change(&mut self, server: &ApiServer) {
        let random = &mut self.random;
        let slot = random.below(8);
        let name = format!("engine-{slot}");
        let known = self.pods.get(&name).cloned();
        let Some(mut pod) = known.filter(|_| !random.is_one_in(6)) else {
            // A new pod, or one that replaces a pod of the same name and address.
            if self.pods.remove(&name).is_some() {
                server.delete("pods", &self.name, &name);
            }
            self.next_uid += 1;
            let (uid, ip) = (self.next_uid.to_string(), format!("127.0.2.{}", slot + 1));
            let pod = TestPod { namespace: self.name.clone(), ..TestPod::ready(&name, &uid, &ip) };
            let pod = TestPod { is_ready: self.random.below(3) > 0, ..pod };
            server.put(pod.object());
            self.pods.insert(name, pod);
            return;
        };
        match random.below(4) {
            0 => pod.is_ready = !pod.is_ready,
            1 => pod.is_terminating = true,
            2 => {
                let app = if random.is_one_in(2) { "engine" } else { "other" };
                pod = pod.labelled("app", app);
            }
            _ => {
                server.delete("pods", &self.name, &name);
                self.pods.remove(&name);
                return;
            }
        }
        server.put(pod.object());
        self.pods.insert(name, pod);
    }

    fn workers(&self, port: u16) -> Workers {
        let selected = self.pods.values().filter(|pod| pod.labels["app"] == "engine");
        selected.flat_map(|pod| pod.workers(&[port])).collect()
    }
}

/// `POINTSMAN_SEED`, else a fixed one. Every failure contains it.
fn seed() -> u64 {
    #[expect(clippy::disallowed_methods, reason = "repetition with another seed")]
    let seed = std::env::var("POINTSMAN_SEED");
    seed.map_or(20_261_123, |seed| seed.parse().expect("a number"))
}

#[tokio::test]
async fn the_workers_are_the_pods_of_the_api_server_after_any_sequence() {
    let (mut server, port, seed) = (ApiServer::start().await, engines().await, seed());
    let mut random = Random(seed);
    let mut namespaces: Vec<Namespace> = (0..SEQUENCES)
        .map(|n| {
            let (name, random) = (format!("n{n}"), Random(random.next()));
            Namespace { name, pods: BTreeMap::new(), next_uid: 0, random }
        })
        .collect();
    let directory = Directory::new();
    directory.kubeconfig(&server.url(), &[], &json!({}));
    let of_model = |namespace: &Namespace| {
        let name = &namespace.name;
        let selection = format!("namespace = \"{name}\"\nselector = \"app=engine\"\nports = [{port}]");
        (name.clone(), format!("{selection}\nkubeconfig_file = \"kubeconfig\""))
    };
    let models: Vec<(String, String)> = namespaces.iter().map(of_model).collect();
    let models: Vec<(&str, String)> = models.iter().map(|(name, lines)| (name.as_str(), lines.clone())).collect();
    let gateway = WatchingGateway::start(directory, &settings(&models)).await;
    let mut history = Vec::new();
    let mut is_down = false;
    for n in 1..=CHANGES {
        for namespace in &mut namespaces {
            namespace.change(&server);
        }
        match random.below(12) {
            0 => {
                server.disconnect();
                history.push("disconnect");
            }
            1 => {
                server.hold();
                history.push("hold");
            }
            2 => {
                server.expire();
                history.push("expire");
            }
            3 if !is_down => {
                server.stop().await;
                is_down = true;
                history.push("stop");
            }
            4 if is_down => {
                server.restart().await;
                is_down = false;
                history.push("restart");
            }
            5 | 6 => {
                // Part of the changes is delivered.
                gateway.workers("n0").await;
                history.push("read");
            }
            _ => {}
        }
        if n % COMPARED_EVERY > 0 {
            continue;
        }
        if std::mem::take(&mut is_down) {
            server.restart().await;
        }
        match random.is_one_in(2) {
            true => server.expire(),
            false => server.release(),
        }
        for namespace in &namespaces {
            let what = format!("POINTSMAN_SEED={seed}, after {n} changes and {history:?}");
            gateway.until_workers(&namespace.name, &namespace.workers(port), &what).await;
        }
    }
    // Few sequences without an expired watch are left. Here the running watches miss changes.
    for _ in 0..20 {
        if server.expired() > 0 {
            return;
        }
        server.hold();
        namespaces.iter_mut().for_each(|namespace| namespace.change(&server));
        server.expire();
        for namespace in &namespaces {
            let what = format!("POINTSMAN_SEED={seed}, expired watches");
            gateway.until_workers(&namespace.name, &namespace.workers(port), &what).await;
        }
    }
    panic!("POINTSMAN_SEED={seed}: no watch has expired");
}
